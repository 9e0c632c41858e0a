//! Calls that compute, on tokio with tower's `load_shed` and `ConcurrencyLimit`: calls beyond the
//! limit are answered as busy.
//!
//! Each line is a call in a task, so that several of one connection, and of all connections, are in
//! progress: a call that ran where its line is read would never meet another one, and nothing would
//! be shed.

use std::convert::Infallible;
use std::io;
use std::time::Duration;

use common::WORK_LIMIT;
use futures_util::{FutureExt, StreamExt, stream::FuturesOrdered};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

#[expect(clippy::disallowed_methods, reason = "a rival has its own clock")]
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Computes for this much CPU time.
fn compute(time: Duration) {
    let until = cpu_time() + time;
    while cpu_time() < until {
        std::hint::spin_loop();
    }
}

fn main() -> io::Result<()> {
    let (time, address) = common::work_arguments();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    LocalSet::new().block_on(&runtime, async move {
        let listener = TcpListener::from_std(common::listen(address)?)?;
        common::announce(listener.local_addr()?)?;
        let work = service_fn(move |()| async move {
            compute(time);
            Ok::<_, Infallible>(())
        });
        // One limit for all connections.
        let service = ServiceBuilder::new().load_shed().concurrency_limit(WORK_LIMIT).service(work);
        loop {
            // Out of descriptors: let connections end before the next try.
            let Ok((stream, _)) = listener.accept().await else { continue };
            spawn_local(serve(stream, service.clone()));
        }
    })
}

/// Answers in the order of the lines, and sends all available answers in one write.
async fn serve<S>(stream: TcpStream, mut service: S) -> io::Result<()>
where
    S: Service<(), Response = ()> + Clone + 'static,
    S::Future: 'static,
{
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::with_capacity(common::BUFFER_BYTES, reader);
    let mut calls = FuturesOrdered::new();
    let (mut line, mut answers) = (Vec::new(), Vec::new());
    let mut is_open = true;
    while is_open || !calls.is_empty() {
        tokio::select! {
            // Completed calls are answered before more is read.
            biased;
            Some(is_done) = calls.next(), if !calls.is_empty() => {
                let mut done = Some(is_done);
                while let Some(is_done) = done {
                    let is_done: Result<bool, _> = is_done;
                    answers.extend_from_slice(if is_done.unwrap_or(false) { b"done\n" } else { b"busy\n" });
                    done = calls.next().now_or_never().flatten();
                }
                writer.write_all(&answers).await?;
                answers.clear();
            }
            read = reader.read_until(b'\n', &mut line), if is_open => {
                is_open = read? > 0 && line.ends_with(b"\n");
                if is_open {
                    line.clear();
                    // Never waits, since excess calls fail.
                    let Ok(ready) = service.ready().await else { break };
                    let call = ready.call(());
                    calls.push_back(spawn_local(async move { call.await.is_ok() }));
                }
            }
        }
    }
    Ok(())
}
