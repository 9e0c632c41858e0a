//! The framings that ship, drawn with any options, and naive definitions of the same to compare
//! them with.

use alloc::rc::Rc;
use alloc::vec::Vec;

use proptest::prelude::*;

use crate::bytes::Outbox;
use crate::framing::*;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    Raw,
    Lines { crlf: bool, bytes_max: Option<usize> },
    Delimiter { bytes: Vec<u8>, bytes_max: Option<usize> },
    Fixed(usize),
    Length { width: u8, little: bool, adjust: i32, offset: u8, keep: bool },
}

/// One frame by definition.
#[derive(Debug)]
pub struct Defined {
    pub payload: Vec<u8>,
    pub wire: Vec<u8>,
}

pub fn any_shape() -> impl Strategy<Value = Shape> {
    let bytes_max = || prop_oneof![Just(None), (200usize..300).prop_map(Some)];
    let adjust = prop_oneof![3 => Just(0), 2 => -20..20, 1 => any::<i32>()];
    let widths = prop::sample::select(&[0u8, 1, 2, 3, 4, 8]);
    prop_oneof![
        1 => Just(Shape::Raw),
        2 => (any::<bool>(), bytes_max()).prop_map(|(crlf, bytes_max)| Shape::Lines { crlf, bytes_max }),
        2 => (prop::collection::vec(prop::sample::select(b"ab"), 1..6), bytes_max())
            .prop_map(|(bytes, bytes_max)| Shape::Delimiter { bytes, bytes_max }),
        1 => prop::collection::vec(any::<u8>(), 255)
            .prop_map(|bytes| Shape::Delimiter { bytes, bytes_max: None }),
        1 => (1usize..300).prop_map(Shape::Fixed),
        6 => (widths, any::<bool>(), adjust, prop_oneof![Just(0), 0u8..20], any::<bool>())
            .prop_map(|(width, little, adjust, offset, keep)| Shape::Length { width, little, adjust, offset, keep }),
    ]
}

impl Shape {
    pub fn framing(&self) -> Drawn {
        match self {
            Shape::Raw => both(Raw),
            Shape::Lines { crlf, bytes_max } => {
                let lines = if *crlf { Lines::crlf() } else { Lines::default() };
                both(lines.bytes_max(bytes_max.unwrap_or(usize::MAX)))
            }
            Shape::Delimiter { bytes, bytes_max } => {
                both(Delimiter::new(bytes).bytes_max(bytes_max.unwrap_or(usize::MAX)))
            }
            Shape::Fixed(bytes) => both(Fixed::bytes(*bytes)),
            Shape::Length { width, little, adjust, offset, keep } => {
                if (*adjust, *offset, *keep) == (0, 0, false) && *width > 0 {
                    let order = if *little { ByteOrder::Little } else { ByteOrder::Big };
                    return both(LengthPrefix::bytes(*width).order(order));
                }
                let mut framing = match width {
                    0 => LengthPrefix::varint(),
                    width => LengthPrefix::bytes(*width).adjust(0),
                };
                if *little && *width > 0 {
                    framing = framing.order(ByteOrder::Little);
                }
                framing = framing.adjust(*adjust).offset(*offset);
                both(if *keep { framing.keep_header(true) } else { framing })
            }
        }
    }

    /// A frame made of `body`, or a payload that has none.
    pub fn payload(&self, body: &[u8]) -> Result<Defined, Vec<u8>> {
        match self {
            Shape::Raw => Ok(Defined { payload: body.to_vec(), wire: body.to_vec() }),
            Shape::Lines { crlf, bytes_max } => {
                let ending: &[u8] = if *crlf { b"\r\n" } else { b"\n" };
                let mut payload = body.to_vec();
                payload.iter_mut().filter(|byte| matches!(byte, b'\r' | b'\n')).for_each(|byte| *byte = b'_');
                payload.truncate(bytes_max.map_or(usize::MAX, |max| max - ending.len()));
                Ok(Defined { wire: [&payload, ending].concat(), payload })
            }
            Shape::Delimiter { bytes, bytes_max } => {
                let mut payload = body.to_vec();
                if bytes.len() < 6 {
                    // Few enough letters that delimiters occur by accident, but not in each
                    // payload.
                    payload
                        .iter_mut()
                        .for_each(|byte| *byte = if *byte < 40 { b'a' + *byte % 2 } else { b'c' });
                }
                payload.truncate(bytes_max.map_or(usize::MAX, |max| max - bytes.len()));
                let wire = [&payload[..], bytes].concat();
                let first = wire.windows(bytes.len()).position(|window| window == bytes);
                if first == Some(payload.len()) { Ok(Defined { payload, wire }) } else { Err(payload) }
            }
            Shape::Fixed(bytes) if body.len().is_multiple_of(5) => {
                let payload: Vec<u8> = body.iter().chain(&[7; 300]).take(*bytes).copied().collect();
                Ok(Defined { wire: payload.clone(), payload })
            }
            Shape::Fixed(bytes) if body.len() == *bytes => {
                Ok(Defined { payload: body.into(), wire: body.into() })
            }
            Shape::Fixed(_) => Err(body.to_vec()),
            Shape::Length { width, little, adjust, offset, keep } => {
                let keep = *keep || *offset > 0;
                let length = body.len() as i128 - i128::from(*adjust);
                let fits = length >= 0 && (matches!(width, 0 | 8) || length < 1 << (8 * width));
                let before = alloc::vec![0xFE; usize::from(*offset)];
                if !fits {
                    // With a kept header any length is wrong, as 0 is here.
                    let wrong = [&before, &digits(0, *width, *little), body].concat();
                    return Err(if keep { wrong } else { body.to_vec() });
                }
                let wire = [&before, &digits(length as u64, *width, *little), body].concat();
                Ok(Defined { payload: if keep { wire.clone() } else { body.to_vec() }, wire })
            }
        }
    }
}

/// A framing that decodes as it does and encodes as a shard does for it.
pub struct Drawn {
    decoding: Rc<dyn Framing>,
    pub encoding: Encoding,
}

impl Framing for Drawn {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        self.decoding.decode(bytes, scanned)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.encoding.encode(payload, out)
    }
}

fn both<F: Framing>(framing: F) -> Drawn {
    let decoding = Rc::new(framing);
    let encoding = decoding.encoding();
    assert!(!matches!(encoding, Encoding::Custom(_)), "a framing that ships costs no indirect call");
    Drawn { decoding, encoding }
}

/// A number of a fixed width, or as a varint.
fn digits(mut number: u64, width: u8, little: bool) -> Vec<u8> {
    let mut digits = Vec::new();
    if width == 0 {
        while number >= 128 {
            digits.push((number % 128) as u8 + 128);
            number /= 128;
        }
        digits.push(number as u8);
        return digits;
    }
    for _ in 0..width {
        digits.push((number % 256) as u8);
        number /= 256;
    }
    if !little {
        digits.reverse();
    }
    digits
}
