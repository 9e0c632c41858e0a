//! permessage-deflate (RFC 7692): the negotiation at the upgrade, and the compressor and
//! decompressor that all connections of a shard share.
//!
//! ```text
//!   Sec-WebSocket-Extensions ── negotiate ──▶ its value for the answer
//!   a whole compressed message ── inflate ──▶ the message, or that it exceeds its limit
//!   a message ── compress ──▶ a compressed one, if that is worthwhile
//! ```
//!
//! A context of zlib takes 46 KiB to inflate and 371 KiB to compress, so no connection has one: no
//! message refers to an earlier one, in both directions (`server_no_context_takeover`,
//! `client_no_context_takeover`). A shard creates its two when the first message needs them.

use std::fmt;

use zlib_rs::{DeflateFlush, InflateFlush, Status, compress_bound};

use crate::extension::{Extension, InflateError};
use crate::options::WebSocketOptions;

/// The end of each compressed message, which is not sent: an empty block.
const TAIL: [u8; 4] = [0, 0, 0xff, 0xff];

/// log2 of the distance in bytes over which deflate may refer back. Offers with a smaller one are
/// declined: all share the compressor.
const WINDOW_BITS: u8 = 15;

/// The agreed parameters.
const AGREED: &str = "permessage-deflate; server_no_context_takeover; client_no_context_takeover";

/// Bytes that a compressed message may leave allocated.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// Messages that are remembered, and the length of the longest: a message for many connections is
/// compressed once, even if each receives several in a turn. Comparing one costs a fraction of
/// compressing it.
const RECENT: usize = 4;
const RECENT_BYTES_MAX: usize = 16 << 10;

/// Bytes inflated in the first step. A step asks for as many as there are already, so that a short
/// message costs little memory and a long one few steps.
const STEP: usize = 4 << 10;

/// Ends of a deflate stream in one message. Usually there is none (RFC 7692, 7.2.3.4 allows it),
/// and each costs a reset.
const ENDS_MAX: u32 = 8;

/// Compression of messages on connections whose clients can inflate them.
///
/// A shard has 371 KiB to compress and 46 KiB to inflate, once a message needs them, and up to 128
/// KiB of the latest messages. Messages that a client compressed are inflated to at most
/// `message_bytes_max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Deflate {
    /// Level from 1, the fastest, to 9, the smallest. Other values are clamped. Default 1: with 6 a
    /// message of JSON takes two to three times as long and is a quarter smaller.
    pub level: u8,
    /// Messages of fewer bytes are sent uncompressed. Default 256: shorter ones hardly become
    /// smaller without a context.
    pub message_bytes_min: usize,
}

impl Default for Deflate {
    fn default() -> Deflate {
        Deflate { level: 1, message_bytes_min: 256 }
    }
}

impl Deflate {
    /// Sets [`level`](Deflate::level).
    #[must_use]
    pub fn level(self, level: u8) -> Deflate {
        Deflate { level, ..self }
    }

    /// Sets [`message_bytes_min`](Deflate::message_bytes_min).
    #[must_use]
    pub fn message_bytes_min(self, bytes: usize) -> Deflate {
        Deflate { message_bytes_min: bytes, ..self }
    }
}

impl WebSocketOptions {
    /// Compresses messages, for clients that offer it. This is worth its time where bandwidth is
    /// expensive: a message of JSON shrinks to a third or a fourth, in some tens of microseconds.
    /// Do not compress messages that are encrypted below and mix secrets with data that an attacker
    /// chooses: lengths reveal secrets (CRIME, BREACH).
    #[must_use]
    pub fn deflate(self, deflate: Deflate) -> WebSocketOptions {
        self.extension(move || PerMessageDeflate::new(deflate))
    }
}

/// A header `Sec-WebSocket-Extensions` that does not follow its grammar (RFC 6455, 9.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GrammarError;

/// The answer to a client, by the list in its `Sec-WebSocket-Extensions`: the first offer of
/// permessage-deflate that is fully understood is accepted. An offer with an unknown parameter,
/// with one twice or with a value out of its range is declined, and so are other extensions.
fn agree(offers: &[u8]) -> Result<Option<String>, GrammarError> {
    let (mut agreed, mut cursor) = (None, Cursor { rest: offers });
    loop {
        // Empty elements of a list are allowed.
        while cursor.takes(b',') {}
        if cursor.rest.is_empty() {
            return Ok(agreed);
        }
        // All offers are read, since a header is well-formed as a whole.
        let offer = cursor.offer()?;
        agreed = agreed.or(offer);
        if !cursor.rest.is_empty() && !cursor.takes(b',') {
            return Err(GrammarError);
        }
    }
}

/// The unread rest of a header's value.
struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// Takes this byte and the space around it, if it is next.
    fn takes(&mut self, byte: u8) -> bool {
        self.rest = self.rest.trim_ascii_start();
        let Some(rest) = self.rest.strip_prefix(&[byte]) else { return false };
        self.rest = rest.trim_ascii_start();
        true
    }

    fn token(&mut self) -> Result<&'a [u8], GrammarError> {
        let len = self.rest.iter().position(|byte| !is_token(*byte)).unwrap_or(self.rest.len());
        let (token, rest) = self.rest.split_at(len);
        self.rest = rest;
        if token.is_empty() { Err(GrammarError) } else { Ok(token) }
    }

    /// A token, which may be quoted.
    fn value(&mut self) -> Result<Vec<u8>, GrammarError> {
        if self.rest.first() != Some(&b'"') {
            return Ok(self.token()?.to_vec());
        }
        let (mut value, mut bytes) = (Vec::new(), self.rest[1..].iter());
        loop {
            match bytes.next() {
                Some(b'"') => break,
                Some(b'\\') => value.push(*bytes.next().ok_or(GrammarError)?),
                Some(byte) => value.push(*byte),
                None => return Err(GrammarError),
            }
        }
        self.rest = bytes.as_slice();
        if value.is_empty() || !value.iter().all(|byte| is_token(*byte)) {
            return Err(GrammarError);
        }
        Ok(value)
    }

    /// One offer. `None` if it is declined.
    fn offer(&mut self) -> Result<Option<String>, GrammarError> {
        self.rest = self.rest.trim_ascii_start();
        let mut is_fine = self.token()?.eq_ignore_ascii_case(b"permessage-deflate");
        let (mut seen, mut names_bits) = ([false; 4], false);
        while self.takes(b';') {
            let name = self.token()?;
            let value = if self.takes(b'=') { Some(self.value()?) } else { None };
            let known: [&[u8]; 4] = [
                b"server_no_context_takeover",
                b"client_no_context_takeover",
                b"server_max_window_bits",
                b"client_max_window_bits",
            ];
            let Some(at) = known.iter().position(|known| name.eq_ignore_ascii_case(known)) else {
                is_fine = false;
                continue;
            };
            is_fine &= !std::mem::replace(&mut seen[at], true);
            let bits = value.as_deref().map(window_bits_of);
            is_fine &= match (at, bits) {
                (0 | 1, bits) => bits.is_none(),
                // The answer has to name the window bits.
                (2, bits) => {
                    names_bits = true;
                    bits == Some(Some(WINDOW_BITS))
                }
                // Messages that a client compresses are inflated with the largest window anyway.
                (_, bits) => bits != Some(None),
            };
        }
        self.rest = self.rest.trim_ascii_start();
        let bits = if names_bits { "; server_max_window_bits=15" } else { "" };
        Ok(is_fine.then(|| format!("{AGREED}{bits}")))
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A number from 8 to 15, in decimal without leading zeros.
fn window_bits_of(value: &[u8]) -> Option<u8> {
    match value {
        [digit @ b'8'..=b'9'] => Some(digit - b'0'),
        [b'1', digit @ b'0'..=b'5'] => Some(10 + digit - b'0'),
        _ => None,
    }
}

/// The compressor and the decompressor of a shard, for [`WebSocketOptions::extension`].
pub struct PerMessageDeflate {
    options: Deflate,
    compressor: Option<zlib_rs::Deflate>,
    decompressor: Option<zlib_rs::Inflate>,
    /// The message that was compressed last.
    compressed: Vec<u8>,
    /// Messages with their compressed forms, where compression is worthwhile. The oldest one, at
    /// `next`, is replaced.
    recent: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    next: usize,
}

impl PerMessageDeflate {
    /// Creates an extension that has no memory yet.
    pub fn new(options: Deflate) -> PerMessageDeflate {
        let (compressed, recent) = Default::default();
        PerMessageDeflate { options, compressor: None, decompressor: None, compressed, recent, next: 0 }
    }

    fn remember(&mut self, message: &[u8], compressed: Option<Vec<u8>>) {
        let message = (message.to_vec(), compressed);
        match self.recent.get_mut(self.next) {
            Some(oldest) => *oldest = message,
            None => self.recent.push(message),
        }
        self.next = (self.next + 1) % RECENT;
    }

    /// The length of `message` compressed at the start of `compressed`; `None` if compression is
    /// not worthwhile.
    fn compress_now(&mut self, message: &[u8]) -> Option<usize> {
        let level = i32::from(self.options.level.clamp(1, 9));
        let make = || zlib_rs::Deflate::new(level, false, WINDOW_BITS);
        let compressor = self.compressor.get_or_insert_with(make);
        compressor.reset();
        let out = &mut self.compressed;
        out.clear();
        if out.capacity() > KEPT_BYTES_MAX {
            *out = Vec::new();
        }
        // All of it fits: a compressor that is stopped in the middle is not the same after a reset.
        let room = compress_bound(message.len()) + TAIL.len();
        out.try_reserve_exact(room).ok()?;
        out.resize(room, 0);
        let status = compressor.compress(message, out, DeflateFlush::SyncFlush);
        let made = usize::try_from(compressor.total_out()).unwrap_or(usize::MAX);
        if status != Ok(Status::Ok) || compressor.total_in() != message.len() as u64 || made >= room {
            self.compressor = None;
            return None;
        }
        let compressed = out[..made].strip_suffix(&TAIL)?;
        (compressed.len() < message.len()).then_some(compressed.len())
    }
}

impl Extension for PerMessageDeflate {
    /// Treats a malformed header as no offer.
    fn negotiate(&self, offers: &str) -> Option<String> {
        agree(offers.as_bytes()).unwrap_or(None)
    }

    /// Takes at most twice `bytes_max` bytes of memory, whatever the payload inflates to.
    fn inflate(&mut self, payload: &[u8], bytes_max: usize, out: &mut Vec<u8>) -> Result<(), InflateError> {
        let make = || zlib_rs::Inflate::new(false, WINDOW_BITS);
        let decompressor = self.decompressor.get_or_insert_with(make);
        decompressor.reset(false);
        inflate(decompressor, payload, bytes_max, out)
    }

    fn compress(&mut self, payload: &[u8]) -> Option<&[u8]> {
        if payload.len() < self.options.message_bytes_min.max(1) {
            return None;
        }
        if let Some(at) = self.recent.iter().position(|(message, _)| message == payload) {
            return self.recent[at].1.as_deref();
        }
        let len = self.compress_now(payload);
        if payload.len() <= RECENT_BYTES_MAX {
            let compressed = len.map(|len| self.compressed[..len].to_vec());
            self.remember(payload, compressed);
        }
        len.map(|len| &self.compressed[..len])
    }
}

impl fmt::Debug for PerMessageDeflate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerMessageDeflate").field("options", &self.options).finish_non_exhaustive()
    }
}

fn inflate(
    decompressor: &mut zlib_rs::Inflate,
    payload: &[u8],
    bytes_max: usize,
    out: &mut Vec<u8>,
) -> Result<(), InflateError> {
    let (from, mut ends) = (out.len(), 0);
    for mut piece in [payload, &TAIL] {
        loop {
            let inflated = out.len() - from;
            // One byte above the limit shows that there are more.
            let room = inflated.clamp(STEP, usize::MAX).min(bytes_max - inflated + 1);
            let (taken, made) = (decompressor.total_in(), decompressor.total_out());
            let at = out.len();
            out.try_reserve_exact(room).map_err(|_| InflateError::NoMemory)?;
            out.resize(at + room, 0);
            let status = decompressor.decompress(piece, &mut out[at..], InflateFlush::SyncFlush);
            let taken = (decompressor.total_in() - taken) as usize;
            let made = (decompressor.total_out() - made) as usize;
            out.truncate(at + made);
            piece = &piece[taken..];
            if out.len() - from > bytes_max {
                return Err(InflateError::TooLarge);
            }
            match status {
                Err(_) => return Err(InflateError::Malformed),
                Ok(Status::StreamEnd) => {
                    // The following bytes are a stream that may refer to earlier ones of its
                    // message.
                    ends += 1;
                    if ends > ENDS_MAX {
                        return Err(InflateError::Malformed);
                    }
                    decompressor.reset(false);
                    let known = out.len() - from;
                    let window = &out[out.len() - known.min(1 << WINDOW_BITS)..];
                    if !window.is_empty() && decompressor.set_dictionary(window).is_err() {
                        return Err(InflateError::Malformed);
                    }
                }
                // There may be more output, as long as there is no room left.
                Ok(Status::Ok | Status::BufError) if made == room => {}
                Ok(Status::Ok | Status::BufError) if taken == 0 && !piece.is_empty() => {
                    return Err(InflateError::Malformed);
                }
                Ok(Status::Ok | Status::BufError) => {}
            }
            if piece.is_empty() && made < room {
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn agreed(offers: &str) -> Option<String> {
        agree(offers.as_bytes()).expect("it is well-formed")
    }

    #[test]
    fn offers_that_are_understood_are_accepted() {
        let plain = [
            "permessage-deflate",
            "permessage-deflate; client_max_window_bits",
            "permessage-deflate;client_max_window_bits=\"10\"",
            "permessage-deflate; server_no_context_takeover; client_no_context_takeover",
            " , PerMessage-Deflate ; CLIENT_max_window_bits = 15 ,",
            "x-webkit-deflate-frame; a=\"b\\c\", permessage-deflate",
        ];
        for offer in plain {
            assert_eq!(agreed(offer).as_deref(), Some(AGREED), "{offer}");
        }
        let bits = agreed("permessage-deflate; server_max_window_bits=15");
        assert_eq!(bits, Some(format!("{AGREED}; server_max_window_bits=15")));
    }

    #[test]
    fn offers_that_are_not_understood_are_declined() {
        let declined = [
            "",
            "x-webkit-deflate-frame",
            "permessage-deflate; unknown",
            "permessage-deflate; server_max_window_bits",
            "permessage-deflate; server_max_window_bits=14",
            "permessage-deflate; server_max_window_bits=8",
            "permessage-deflate; server_max_window_bits=16",
            "permessage-deflate; server_max_window_bits=09",
            "permessage-deflate; client_max_window_bits=8; client_max_window_bits=9",
            "permessage-deflate; client_max_window_bits=x",
            "permessage-deflate; server_no_context_takeover=1",
            "permessage-deflate; server_no_context_takeover; server_no_context_takeover",
        ];
        for offer in declined {
            assert_eq!(agreed(offer), None, "{offer}");
        }
    }

    #[test]
    fn first_offer_that_is_understood_counts() {
        let offers = "permessage-deflate; server_max_window_bits=9, permessage-deflate; unknown=1, \
            permessage-deflate; server_max_window_bits=15, permessage-deflate";
        assert_eq!(agreed(offers), Some(format!("{AGREED}; server_max_window_bits=15")));
    }

    #[test]
    fn malformed_headers_are_errors_wherever_they_are() {
        let malformed = [
            "permessage-deflate; client_max_window_bits=\"1",
            "permessage-deflate;",
            "permessage-deflate; ; x",
            "permessage-deflate; x=",
            "permessage-deflate; x=\"\"",
            "permessage-deflate; x=\"a b\"",
            "permessage-deflate permessage-deflate",
            "permessage-deflate, =",
            "\u{e4}",
        ];
        for value in malformed {
            let offers = format!("permessage-deflate, {value}");
            assert_eq!(agree(offers.as_bytes()), Err(GrammarError), "{value}");
            assert_eq!(shard().negotiate(&offers), None, "{value}");
        }
    }

    fn shard() -> PerMessageDeflate {
        PerMessageDeflate::new(Deflate::default().message_bytes_min(0))
    }

    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|at| b"ringserve "[at % 10] ^ (at / 1000) as u8 & 3).collect()
    }

    fn inflated(compressed: &[u8], bytes_max: usize) -> Result<Vec<u8>, InflateError> {
        let mut out = b"before".to_vec();
        shard().inflate(compressed, bytes_max, &mut out)?;
        assert_eq!(&out[..6], b"before");
        Ok(out.split_off(6))
    }

    #[test]
    fn messages_come_back_as_they_were() {
        let mut shard = shard();
        for len in [20, 100, 4095, 4096, 4097, 65_536, 1 << 20, 20] {
            let (message, mut back) = (text(len), Vec::new());
            let compressed = shard.compress(&message).expect("it is worth it").to_vec();
            assert!(compressed.len() < len, "{len}");
            shard.inflate(&compressed, len, &mut back).unwrap();
            assert!(back == message, "{len}");
        }
        assert!(shard.compressed.capacity() < KEPT_BYTES_MAX, "{}", shard.compressed.capacity());
    }

    #[test]
    fn examples_of_the_standard_are_read() {
        // RFC 7692, 7.2.3.1, 7.2.3.3, 7.2.3.4, 7.2.3.5, 7.2.3.6.
        for hello in [
            &[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00][..],
            &[0x00, 0x05, 0x00, 0xfa, 0xff, 0x48, 0x65, 0x6c, 0x6c, 0x6f, 0x00],
            &[0xf3, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00, 0x00],
            &[0xf2, 0x48, 0x05, 0x00, 0x00, 0x00, 0xff, 0xff, 0xca, 0xc9, 0xc9, 0x07, 0x00],
        ] {
            assert_eq!(inflated(hello, 5).unwrap(), b"Hello", "{hello:x?}");
        }
        assert_eq!(inflated(&[0x00], 0).unwrap(), b"");
    }

    #[test]
    fn stream_that_ends_may_be_referred_to_by_the_next_one() {
        // "Hello", ended, then a copy of those five bytes: length 5, distance 5, and an empty
        // block.
        let mut raw = vec![0xf3, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00];
        let mut again = zlib_rs::Deflate::new(9, false, 15);
        again.set_dictionary(b"Hello").unwrap();
        let mut copy = [0; 64];
        again.compress(b"HelloHello", &mut copy, DeflateFlush::SyncFlush).unwrap();
        raw.extend_from_slice(&copy[..again.total_out() as usize - 4]);
        assert_eq!(inflated(&raw, 15).unwrap(), b"HelloHelloHello");
    }

    #[test]
    fn bomb_takes_no_more_than_the_limit() {
        let mut compressor = zlib_rs::Deflate::new(9, false, 15);
        let (zeros, mut bomb) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        let mut len = 0;
        // 16 MiB; the rest of a larger one is not read.
        for _ in 0..16 {
            compressor.compress(&zeros, &mut bomb[len..], DeflateFlush::NoFlush).unwrap();
            len = compressor.total_out() as usize;
        }
        compressor.compress(&[], &mut bomb[len..], DeflateFlush::SyncFlush).unwrap();
        bomb.truncate(compressor.total_out() as usize - 4);
        assert!(bomb.len() < 20_000, "{}", bomb.len());
        let mut shard = shard();
        for limit in [0, 1, 4095, 4096, 1 << 20, (16 << 20) - 1] {
            let mut out = Vec::new();
            assert_eq!(shard.inflate(&bomb, limit, &mut out), Err(InflateError::TooLarge), "{limit}");
            assert!(out.capacity() <= (2 * limit).max(STEP), "{limit}: {}", out.capacity());
        }
        let mut out = Vec::new();
        shard.inflate(&bomb, 16 << 20, &mut out).unwrap();
        assert_eq!(out.len(), 16 << 20);
    }

    #[test]
    fn malformed_messages_are_refused_and_harm_no_later_one() {
        let mut shard = shard();
        // A block of no kind, a stored one with a wrong length, streams that end again and again.
        let ends = [0x03, 0x00].repeat(1000);
        for bad in [&[0xff][..], &[0x00, 0x05, 0x00, 0x05, 0x00], &ends] {
            let (mut out, mut next) = (Vec::new(), Vec::new());
            assert_eq!(shard.inflate(bad, 1000, &mut out), Err(InflateError::Malformed), "{bad:x?}");
            shard.inflate(&[0xf2, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0x00], 5, &mut next).unwrap();
            assert_eq!(next, b"Hello");
        }
    }

    #[test]
    fn what_is_short_or_would_not_shrink_leaves_as_it_is() {
        let mut shard = PerMessageDeflate::new(Deflate::default());
        let mut state = 1u64;
        let random = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        for message in [Vec::new(), text(255), (0..5000).map(random).collect()] {
            assert_eq!(shard.compress(&message), None, "{} bytes", message.len());
        }
        assert!(shard.compress(&text(256)).is_some());
    }

    proptest! {
        #[test]
        fn random_bytes_and_random_messages_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            limit in 0usize..5000,
        ) {
            let (mut shard, mut out) = (shard(), Vec::new());
            if shard.inflate(&bytes, limit, &mut out).is_ok() {
                prop_assert!(out.len() <= limit);
            }
            if let Some(compressed) = shard.compress(&bytes).map(<[u8]>::to_vec) {
                out.clear();
                shard.inflate(&compressed, bytes.len(), &mut out).unwrap();
                prop_assert_eq!(out, bytes);
            }
        }
    }
}
