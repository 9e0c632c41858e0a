//! Clients of frames if they need a real kernel, on each driver, with a shard's own loop and inside
//! runtimes.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use ringserve::framing::LengthPrefix;
use ringserve::server::{Driver, Runtime};
use ringserve::{Cx, Frame, Service, Stream, stream};
use ringserve_tests::client::End;
use ringserve_tests::{Client, On, no_time_limits, on_epoll, pattern, watch};

struct Answers;

impl Service for Answers {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), Infallible> {
        cx.reply(question);
        Ok(())
    }
}

const QUESTIONS: usize = 300;

/// Sends all questions in one task and receives the answers in another one.
async fn ask_all(mut client: Stream, to: SocketAddr) -> io::Result<()> {
    let shard = client.shard().clone();
    let (mut answers, questions) = shard.connect(to).await?.framed(LengthPrefix::default()).split();
    shard.spawn(async move {
        for n in 0..QUESTIONS {
            questions.send(&pattern(n * 97)).await.expect("the upstream is there");
        }
        questions
    });
    for n in 0..QUESTIONS {
        let answer = answers.next().await.expect("an answer")?;
        assert!(*answer == pattern(n * 97), "answer {n}");
    }
    // The task has ended, and with the half that writes the upstream's connection.
    assert!(answers.next().await.is_none());
    client.write_all(b"done").await
}

#[test]
fn frames_come_back_in_order_on_each_driver_and_host() {
    let drivers = [Driver::Auto, Driver::Epoll];
    for driver in drivers.into_iter().skip(usize::from(on_epoll())) {
        let on = On { driver, ..On::default() };
        let answers = on.server(no_time_limits()).framing(LengthPrefix::default()).start(|_shard| Answers);
        let answers = answers.expect("the upstream starts");
        let to = answers.local_addrs()[0];
        let runtimes = [
            None,
            Some(Runtime::Tokio),
            #[cfg(feature = "runtime-tokio-uring")]
            Some(Runtime::TokioUring),
        ];
        for runtime in runtimes {
            eprintln!("{driver}, in {runtime:?}");
            // Small enough that `send` waits.
            let server = on.server(no_time_limits().outbox_bytes_high(50_000).outbox_bytes_low(10_000));
            let server = match runtime {
                Some(runtime) => server.runtime(runtime),
                None => server,
            };
            let running = server.start(move |_shard| stream(async move |client| ask_all(client, to).await));
            let running = running.expect("the server starts");
            let mut client = Client::connect(running.local_addrs()[0]);
            assert_eq!(client.read_to_end(), (b"done".to_vec(), End::Fin));
            watch::holds_upstreams(&running, 0);
            watch::finish(running);
        }
        watch::finish(answers);
    }
}
