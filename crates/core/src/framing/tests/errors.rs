//! The errors of each framing, by name.

use alloc::boxed::Box;
use alloc::string::ToString;
use alloc::vec::Vec;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::received;
use crate::framing::*;
use crate::{LimitError, Limits};

type Any = Box<dyn Framing>;
type Make = Box<dyn Fn()>;

#[test]
fn a_length_near_the_end_of_the_address_space_does_not_overflow() {
    for byte in [0xFF, 0x7F] {
        let mut bytes = [0xFF; 9];
        bytes[0] = byte;
        for framing in [
            Box::new(LengthPrefix::bytes(8)) as Any,
            Box::new(LengthPrefix::bytes(8).adjust(i32::MAX).keep_header(true)),
        ] {
            let found = framing.decode(&bytes, 0).unwrap();
            assert!(matches!(found, Decode::More(more) if more > 1 << 60), "{found:?}");
        }
    }
}

#[test]
fn payload_longer_than_its_prefix_writes_nothing() {
    for (width, len) in [(1, 1 << 8), (2, 1 << 16), (3, 1 << 24)] {
        let payload = alloc::vec![0; len];
        assert!(encode_to_vec(&LengthPrefix::bytes(width), &payload).is_err());
        let longest = encode_to_vec(&LengthPrefix::bytes(width), &payload[1..]).unwrap();
        assert_eq!(longest[..usize::from(width)], [0xFF, 0xFF, 0xFF][..usize::from(width)]);
    }
}

#[test]
fn three_bytes_in_either_order() {
    assert_eq!(encode_to_vec(&LengthPrefix::bytes(3), &[7; 258]).unwrap()[..4], [0, 1, 2, 7]);
    let little = LengthPrefix::bytes(3).order(ByteOrder::Little);
    assert_eq!(encode_to_vec(&little, &[7; 258]).unwrap()[..4], [2, 1, 0, 7]);
}

#[test]
fn varint_goes_on_for_no_more_bytes_than_it_may() {
    for max in 1..=10 {
        let varint = LengthField::varint_max(max);
        let all = &[0x80; 10][..max.into()];
        assert_eq!(varint.decode(all, 0), Err(FrameError::VarintOverflow));
        if max > 1 {
            assert_eq!(varint.decode(&all[1..], 0), Ok(Decode::More(1)));
        }
    }
    // After other bytes, and with more bytes than needed.
    let packets = LengthField::varint_max(2).offset(1);
    assert_eq!(packets.decode(&[0x80, 0xFF], 0), Ok(Decode::More(1)));
    assert_eq!(packets.decode(&[0x80, 0xFF, 0x7F], 0), Ok(Decode::More(0x3FFF)));
    assert_eq!(packets.decode(&[0x80, 0xFF, 0x80], 0), Err(FrameError::VarintOverflow));
    assert_eq!(encode_to_vec(&LengthField::varint_max(1), &[7; 127]).unwrap().len(), 128);
    assert!(encode_to_vec(&LengthField::varint_max(1), &[7; 128]).is_err(), "longer than a byte says");
}

#[test]
fn a_varint_is_the_one_of_protocol_buffers() {
    let varint = LengthPrefix::varint();
    assert_eq!(encode_to_vec(&varint, &[7; 300]).unwrap()[..3], [0xAC, 0x02, 7], "their example");
    assert_eq!(varint.decode(&[0x80], 0), Ok(Decode::More(1)));
    assert_eq!(varint.decode(&[0], 0), Ok(Decode::Frame { skip: 1, len: 0, consumed: 1 }));
    let overlong = |bytes: &[u8]| varint.decode(bytes, 0);
    assert_eq!(overlong(&[0x80, 0]), Err(FrameError::VarintOverlong { bytes: 2, needed: 1 }));
    assert_eq!(overlong(&[0xAC, 0x82, 0x80, 0]), Err(FrameError::VarintOverlong { bytes: 4, needed: 2 }));
    let mut most = [0xFF; 10];
    most[9] = 1;
    assert!(matches!(varint.decode(&most, 0), Ok(Decode::More(more)) if more > 1 << 60), "2^64 - 1");
    for last in [2, 0x7F, 0x80, 0x81, 0xFF] {
        most[9] = last;
        assert_eq!(varint.decode(&most, 0), Err(FrameError::VarintOverflow));
        assert_eq!(varint.decode(&most[..9], 0), Ok(Decode::More(1)));
    }
}

#[test]
fn length_that_becomes_negative_is_refused_at_once() {
    let inclusive = LengthPrefix::bytes(2).adjust(-2);
    let negative = Err(FrameError::NegativeLength { length: 1, adjust: -2 });
    assert_eq!(inclusive.decode(&[0, 1], 0), negative);
    assert_eq!(inclusive.keep_header(true).decode(&[0, 1], 0), negative);
    assert_eq!(inclusive.decode(&[0, 2], 0), Ok(Decode::Frame { skip: 2, len: 0, consumed: 2 }));
    assert!(encode_to_vec(&LengthPrefix::bytes(2).adjust(3), b"hi").is_err(), "no length says 2 - 3");
}

#[test]
fn a_kept_header_is_checked_in_replies() {
    let http2 = LengthPrefix::bytes(3).adjust(6).keep_header(true);
    let ping = b"\0\0\x08\x06\0\0\0\0\0pingpong";
    assert_eq!(http2.decode(ping, 0), Ok(Decode::Frame { skip: 0, len: 17, consumed: 17 }));
    assert_eq!(encode_to_vec(&http2, ping).unwrap(), ping);
    for wrong in [&ping[..16], b"", b"\0\0\x08", &[ping, &b"x"[..]].concat(), &ping.repeat(2)] {
        assert!(encode_to_vec(&http2, wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_kept_header_needs_no_other_option() {
    let framing = LengthPrefix::bytes(1).keep_header(true);
    assert_eq!(framing.decode(b"\x01c", 0), Ok(Decode::Frame { skip: 0, len: 2, consumed: 2 }));
    assert_eq!(framing.keep_header(false).decode(b"\x01c", 0), LengthPrefix::bytes(1).decode(b"\x01c", 0));
}

#[test]
fn an_offset_keeps_the_header() {
    let typed = LengthPrefix::bytes(1).offset(2);
    assert_eq!(typed.decode(b"ab\x01c", 0), Ok(Decode::Frame { skip: 0, len: 4, consumed: 4 }));
    assert_eq!(typed.decode(b"a", 0), Ok(Decode::More(2)));
    assert_eq!(typed, typed.keep_header(true));
    assert_eq!(LengthPrefix::bytes(1).offset(0).decode(b"\x01c", 0).unwrap(), {
        Decode::Frame { skip: 1, len: 1, consumed: 2 }
    });
}

#[test]
fn framings_that_cannot_be_are_not_made() {
    let panics: [(&str, Make); 7] = [
        ("1, 2, 3, 4 or 8", Box::new(|| _ = LengthPrefix::bytes(5))),
        ("1, 2, 3, 4 or 8", Box::new(|| _ = LengthPrefix::bytes(0))),
        ("one byte order", Box::new(|| _ = LengthPrefix::varint().order(ByteOrder::Big))),
        ("the header is kept", Box::new(|| _ = LengthPrefix::default().offset(1).keep_header(false))),
        ("at least 1 byte", Box::new(|| _ = Fixed::bytes(0))),
        ("1 to 255 bytes", Box::new(|| _ = Delimiter::new(b""))),
        ("1 to 255 bytes", Box::new(|| _ = Delimiter::new([0; 256]))),
    ];
    for (text, make) in panics {
        let panic = catch_unwind(AssertUnwindSafe(make)).expect_err(text);
        let said = panic.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(said.contains(text), "{said}");
    }
}

#[test]
fn a_frame_is_as_large_as_bytes_max_and_not_a_byte_larger() {
    let over = FrameError::OverBytesMax { max: 8 };
    let framings: [(Any, &[u8], &[u8]); 3] = [
        (Box::new(Lines::default().bytes_max(8)), b"1234567\n", b"12345678\n"),
        (Box::new(Lines::crlf().bytes_max(8)), b"123456\r\n", b"1234567\r\n"),
        (Box::new(Delimiter::new(b"--").bytes_max(8)), b"123456--", b"1234567--"),
    ];
    for (framing, fits, too_long) in framings {
        assert!(matches!(framing.decode(fits, 0), Ok(Decode::Frame { consumed: 8, .. })));
        assert_eq!(framing.decode(too_long, 0), Err(over));
        assert_eq!(framing.decode(&too_long[..7], 0), Ok(Decode::More(1)));
        assert_eq!(framing.decode(b"12345678", 7), Err(over), "nothing that follows makes it fit");
    }
}

#[test]
fn delimiter_formed_with_the_payload_is_refused() {
    let mail = Delimiter::new(b"\r\n.\r\n");
    for bad in [&b"\r\n.\r\n"[..], b"a\r\n.\r\nb", b"a\r\n.", b"\r\n."] {
        assert!(encode_to_vec(&mail, bad).is_err(), "{}", bad.escape_ascii());
    }
    for good in [&b""[..], b"a\r\n", b"a\r\n..", b"."] {
        assert_eq!(encode_to_vec(&mail, good).unwrap(), [good, b"\r\n.\r\n"].concat());
    }
}

#[test]
fn limits_that_contradict_a_framing_are_refused_with_both_names() {
    let refused = |framing: &dyn Framing, frame_bytes_max: usize| {
        framing.check(&Limits { frame_bytes_max, ..Limits::default() }).map_err(|error| error.to_string())
    };
    let text = "Lines::bytes_max is 9 and Limits::frame_bytes_max is 8; Lines::bytes_max must not be larger: lower it, or raise \
                Limits::frame_bytes_max";
    assert_eq!(refused(&Lines::default().bytes_max(9), 8), Err(text.to_string()));
    let cases: [(&str, Any, usize); 6] = [
        ("Delimiter::bytes_max", Box::new(Delimiter::new(b"\0").bytes_max(9)), 9),
        ("Fixed::bytes", Box::new(Fixed::bytes(9)), 9),
        ("LengthPrefix", Box::new(LengthPrefix::default()), 4),
        ("LengthField", Box::new(LengthPrefix::varint().offset(5)), 6),
        ("LengthField", Box::new(LengthPrefix::bytes(3).adjust(6).keep_header(true)), 9),
        ("LengthField", Box::new(LengthPrefix::bytes(3).adjust(-3)), 3),
    ];
    for (name, framing, fits) in cases {
        assert_eq!(refused(&*framing, fits), Ok(()));
        let text = refused(&*framing, fits - 1).unwrap_err();
        assert!(text.contains(name) && text.contains("frame_bytes_max is"), "{text}");
    }
    for (framing, min) in [
        (Box::new(Lines::default().bytes_max(0)) as Any, 1),
        (Box::new(Delimiter::new(b"end").bytes_max(2)), 3),
    ] {
        let error = framing.check(&Limits::default()).unwrap_err();
        assert!(matches!(error, LimitError::Range { min: at_least, .. } if at_least == min), "{error}");
    }
    assert_eq!(refused(&Lines::default().bytes_max(1), 1), Ok(()));
    assert_eq!(refused(&Delimiter::new(b"end").bytes_max(3), 3), Ok(()));
    for framing in [Box::new(Raw) as Any, Box::new(Lines::crlf()), Box::new(Delimiter::new(b"\0"))] {
        assert_eq!(refused(&*framing, 1), Ok(()));
    }
}

#[test]
fn each_error_says_its_values_and_has_a_name_of_its_own() {
    let errors = [
        (FrameError::TooLarge { bytes: 12, max: 10 }, "12", "10"),
        (FrameError::OverBytesMax { max: 10 }, "bytes_max", "10"),
        (FrameError::NegativeLength { length: 3, adjust: -4 }, "3", "-4"),
        (FrameError::VarintOverflow, "10 bytes", "18446744073709551615"),
        (FrameError::VarintOverlong { bytes: 4, needed: 2 }, "4", "2"),
        (FrameError::Malformed("no magic"), "malformed", "no magic"),
    ];
    let mut names: Vec<_> = errors.iter().map(|(error, ..)| error.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), errors.len());
    for (error, value, limit) in errors {
        let text = error.to_string();
        assert!(text.contains(value) && text.contains(limit), "{text}");
    }
    assert!(size_of::<FrameError>() <= 24, "it is part of every close reason");
}

#[test]
fn a_claim_beyond_the_limit_is_refused_before_a_byte_of_it_came() {
    for (framing, claim) in [
        (LengthPrefix::bytes(3).adjust(0), &[0xFF, 0xFF, 0xFF][..]),
        (LengthPrefix::varint(), &[0xFF, 0xFF, 0x7F]),
        (LengthPrefix::bytes(1).offset(1).adjust(i32::MAX), &[0, 0xFF]),
    ] {
        let (frames, error) = received(&framing, &[claim], 1000);
        assert!(frames.is_empty());
        assert!(matches!(error, Some(FrameError::TooLarge { max: 1000, .. })), "{error:?}");
    }
}
