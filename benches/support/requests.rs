//! Requests with ids, as in the example `rpc`, without its database.

use std::time::Duration;

use ringserve::{Cx, Frame, Service};
use serde::{Deserialize, Serialize};

/// The example's default.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// 64 bytes with the length: an id of eight bytes and a value.
pub fn plain_request() -> Vec<u8> {
    framed(&[&7u64.to_le_bytes()[..], &[b'x'; 52]].concat())
}

/// 64 bytes with the length.
pub fn json_request() -> Vec<u8> {
    framed(br#"{"id":1234567,"method":"get","key":"a key of twenty two!!!"}"#)
}

fn framed(payload: &[u8]) -> Vec<u8> {
    assert_eq!(payload.len(), 60);
    [&(payload.len() as u32).to_be_bytes()[..], payload].concat()
}

/// Answers with the id and the value that came with it, within a time limit.
pub enum Requests {
    /// Requests of bytes: the framework's cost for a request.
    Plain,
    /// Requests and answers in JSON, of which serde keeps nothing, so nothing is allocated.
    Json,
}

#[derive(Deserialize)]
struct Request<'a> {
    id: u64,
    method: &'a str,
    key: &'a str,
}

#[derive(Serialize)]
struct Reply<'a> {
    id: u64,
    method: &'a str,
    result: &'a str,
}

impl Service for Requests {
    type Session = ();
    type Error = serde_json::Error;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), serde_json::Error> {
        match self {
            Requests::Plain => {
                match cx.timeout(TIME_LIMIT, async { frame.split_first_chunk::<8>() }).await {
                    Ok(Some((id, value))) => cx.reply_parts([&id[..], value]),
                    _ => cx.reply("too late, or too short"),
                }
                Ok(())
            }
            Requests::Json => {
                let Request { id, method, key } = serde_json::from_slice(&frame)?;
                let result = cx.timeout(TIME_LIMIT, async { key }).await.unwrap_or("too late");
                cx.reply_with(|out| serde_json::to_writer(out, &Reply { id, method, result }))
            }
        }
    }
}
