//! Echo on compio: parts shared by its two forms.

use std::io;
use std::num::NonZero;

use common::{BUFFER_BYTES, Mode, RING_ENTRIES};
use compio::driver::ProactorBuilder;
use compio::net::{TcpListener, TcpStream};
use compio::runtime::RuntimeBuilder;

/// Buffers of the runtime's pool: 16 MiB.
const POOL_BUFFERS: NonZero<u16> = NonZero::new(1024).unwrap();

/// Accepts until the process ends, and gives each connection a task of its mode.
pub fn run(
    raw: impl AsyncFn(TcpStream) + Copy + 'static,
    lines: impl AsyncFn(TcpStream) + Copy + 'static,
) -> io::Result<()> {
    let (mode, address) = common::arguments();
    let mut ring = ProactorBuilder::new();
    // One thread submits and waits in the ring, of which the last three inform the kernel.
    ring.capacity(RING_ENTRIES).single_issuer(true).coop_taskrun(true).defer_taskrun(true);
    ring.buffer_pool_size(POOL_BUFFERS).buffer_pool_buffer_len(BUFFER_BYTES);
    RuntimeBuilder::new().with_proactor(ring).build()?.block_on(async {
        let listener = TcpListener::from_std(common::listen_blocking(address)?)?;
        common::announce(listener.local_addr()?)?;
        loop {
            // If it fails, out of descriptors, the next try is another round through the ring, in
            // which connections can end.
            if let Ok((stream, _)) = listener.accept().await {
                match mode {
                    Mode::Raw => compio::runtime::spawn(async move { raw(stream).await }).detach(),
                    Mode::Lines => compio::runtime::spawn(async move { lines(stream).await }).detach(),
                }
            }
        }
    })
}
