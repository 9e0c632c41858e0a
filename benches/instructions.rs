//! Runs a piece of the fast path a given number of times, for tools that count instructions:
//! `scripts/instructions` runs it under callgrind and compares with the figures kept in the
//! repository. The driver does nothing here; `turns` includes the bookkeeping of a real one.

#[path = "support/echo.rs"]
mod echo;
#[path = "support/loopback.rs"]
mod loopback;
#[path = "support/requests.rs"]
mod requests;

use std::hint::black_box;

use ringserve::Limits;
use ringserve::codec::{CodecCx, CodecService, Decoder, Encoder, WithCodec};
use ringserve::framing::{LengthPrefix, Lines, Raw};
use tokio_util::bytes::BytesMut;
use tokio_util::codec::{LinesCodec, LinesCodecError};

use echo::Echo;
use requests::{Requests, json_request, plain_request};

/// Messages that come together, in the cases that have more than one.
const TOGETHER: usize = 16;

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let (Some(case), Some(turns)) = (args.next(), args.next().and_then(|turns| turns.parse().ok())) else {
        // `cargo bench` runs every benchmark, and passes no case.
        if std::env::args().any(|arg| arg == "--bench") {
            return;
        }
        return println!(
            "usage: instructions CASE TURNS, where CASE is raw, line, lines, rpc, json, codec or codec_alone"
        );
    };
    let line = [[b'x'; 63].as_slice(), b"\n"].concat();
    let lines = line.repeat(TOGETHER);
    let limits = Limits::default();
    let in_flight = Limits::default().calls_in_flight_max(64);
    if case == "codec_alone" {
        return codec_alone(&lines, turns);
    }
    match case.as_str() {
        "raw" => loopback::run(Echo, Raw, limits, &line, turns),
        "line" => loopback::run(Echo, Lines::default(), limits, &line, turns),
        "lines" => loopback::run(Echo, Lines::default(), limits, &lines, turns),
        "rpc" | "json" => {
            let (service, request) = match case.as_str() {
                "rpc" => (Requests::Plain, plain_request()),
                _ => (Requests::Json, json_request()),
            };
            loopback::run(service, LengthPrefix::default(), in_flight, &request.repeat(TOGETHER), turns)
        }
        "codec" => loopback::run(WithCodec::new(EchoItems), Raw, limits, &lines, turns),
        other => panic!("there is no case {other}"),
    };
}

/// Sends each line of the codec back.
struct EchoItems;

impl CodecService for EchoItems {
    type Codec = LinesCodec;
    type Session = ();
    type Error = LinesCodecError;

    fn codec(&self) -> LinesCodec {
        LinesCodec::new()
    }

    async fn call(&self, cx: &CodecCx<'_, Self>, line: String) -> Result<(), LinesCodecError> {
        cx.reply(line)
    }
}

/// The cost of the codec by itself: received bytes are copied to where it decodes, as by hand on
/// another runtime.
fn codec_alone(received: &[u8], turns: u64) {
    let mut codec = LinesCodec::new();
    let (mut input, mut output) = (BytesMut::with_capacity(16 << 10), BytesMut::with_capacity(16 << 10));
    for _ in 0..turns {
        input.extend_from_slice(black_box(received));
        while let Some(line) = codec.decode(&mut input).expect("all are lines") {
            codec.encode(line, &mut output).expect("a line is encoded");
        }
        assert_eq!(black_box(&output).len(), received.len());
        output.clear();
        input.reserve(16 << 10);
    }
}
