//! Keys of users: Ed25519, written in base 32 with a checksum.

use std::fmt;
use std::sync::Arc;

use data_encoding::{BASE32_NOPAD, BASE64URL_NOPAD};
use ring::signature::{Ed25519KeyPair, KeyPair};

/// The first five bits of a seed, `S`, and those of a user's keys, `U`, in the place that each has
/// in a byte.
const SEED: u8 = 18 << 3;
const USER: u8 = 20 << 3;

/// The reason why a text is no key, or no file of credentials.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyError {
    /// It is no seed: not in base 32, of another length, or its checksum is wrong.
    Malformed,
    /// It is a seed, and not that of a user.
    OtherKind,
    /// The file has no JWT of a user, or no seed.
    Incomplete,
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeyError::Malformed => "this is no seed of an NKEY",
            KeyError::OtherKind => "this seed of an NKEY is not that of a user: one begins with SU",
            KeyError::Incomplete => "the credentials have no JWT of a user, or no seed",
        })
    }
}

impl fmt::Debug for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for KeyError {}

/// Signs what a server sent.
#[derive(Clone)]
pub(crate) struct Signer {
    pair: Arc<Ed25519KeyPair>,
    public_key: Arc<str>,
    jwt: Option<Arc<str>>,
}

impl Signer {
    pub(crate) fn from_seed(seed: &str) -> Result<Signer, KeyError> {
        let bytes = BASE32_NOPAD.decode(seed.trim().as_bytes()).map_err(|_| KeyError::Malformed)?;
        let bytes: [u8; 36] = bytes.try_into().map_err(|_| KeyError::Malformed)?;
        let (body, checksum) = bytes.split_at(34);
        if crc16(body).to_le_bytes() != checksum || body[0] & 0xf8 != SEED {
            return Err(KeyError::Malformed);
        }
        // Three bits of the kind are in the first byte, five in the second.
        if (body[0] & 0x07) << 5 | (body[1] & 0xf8) >> 3 != USER {
            return Err(KeyError::OtherKind);
        }
        let pair = Ed25519KeyPair::from_seed_unchecked(&body[2..]).map_err(|_| KeyError::Malformed)?;
        let mut public = vec![USER];
        public.extend_from_slice(pair.public_key().as_ref());
        let checksum = crc16(&public).to_le_bytes();
        public.extend_from_slice(&checksum);
        Ok(Signer { pair: Arc::new(pair), public_key: BASE32_NOPAD.encode(&public).into(), jwt: None })
    }

    pub(crate) fn from_credentials(text: &str) -> Result<Signer, KeyError> {
        let jwt = between(text, "BEGIN NATS USER JWT").ok_or(KeyError::Incomplete)?;
        let seed = between(text, "BEGIN USER NKEY SEED").ok_or(KeyError::Incomplete)?;
        Ok(Signer { jwt: Some(jwt.into()), ..Signer::from_seed(seed)? })
    }

    pub(crate) fn public_key(&self) -> &str {
        &self.public_key
    }

    pub(crate) fn jwt(&self) -> Option<&str> {
        self.jwt.as_deref()
    }

    pub(crate) fn sign(&self, nonce: &str) -> String {
        BASE64URL_NOPAD.encode(self.pair.sign(nonce.as_bytes()).as_ref())
    }
}

/// The line behind the one that has `begin`.
fn between<'a>(text: &'a str, begin: &str) -> Option<&'a str> {
    let mut lines = text.lines().map(str::trim).skip_while(|line| !line.contains(begin)).skip(1);
    lines.find(|line| !line.is_empty()).filter(|line| !line.starts_with('-'))
}

/// CRC-16 as XMODEM has it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte) << 8,
            |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seed and public key of the documentation of NATS.
    const SEED_TEXT: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
    const PUBLIC: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";

    #[test]
    fn public_key_is_that_of_the_seed() {
        let signer = Signer::from_seed(SEED_TEXT).unwrap();
        assert_eq!(signer.public_key(), PUBLIC);
        assert_eq!(signer.sign("nonce").len(), 86);
    }

    #[test]
    fn texts_that_are_no_seeds_are_refused() {
        let refused = |text: &str| Signer::from_seed(text).err();
        assert_eq!(refused(""), Some(KeyError::Malformed));
        assert_eq!(refused(PUBLIC), Some(KeyError::Malformed));
        assert_eq!(refused(&SEED_TEXT.replace("SL3", "SL4")), Some(KeyError::Malformed));
        let mut account = BASE32_NOPAD.decode(SEED_TEXT.as_bytes()).unwrap();
        (account[0], account[1]) = (SEED, 0);
        let checksum = crc16(&account[..34]).to_le_bytes();
        account[34..].copy_from_slice(&checksum);
        assert_eq!(refused(&BASE32_NOPAD.encode(&account)), Some(KeyError::OtherKind));
    }

    #[test]
    fn credentials_are_found_in_their_file() {
        let text = format!(
            "-----BEGIN NATS USER JWT-----\nabc.def\n------END NATS USER JWT------\n\nKeep it secret.\n\n\
             -----BEGIN USER NKEY SEED-----\n{SEED_TEXT}\n------END USER NKEY SEED------\n"
        );
        let signer = Signer::from_credentials(&text).unwrap();
        assert_eq!((signer.jwt(), signer.public_key()), (Some("abc.def"), PUBLIC));
        let refused = |text: &str| Signer::from_credentials(text).err();
        assert_eq!(refused(SEED_TEXT), Some(KeyError::Incomplete));
        assert_eq!(refused(&text.replace("abc.def\n", "")), Some(KeyError::Incomplete));
        assert_eq!(refused(&text.replace(SEED_TEXT, "SU")), Some(KeyError::Malformed));
    }
}
