//! Who a client is, and what it may do: a JSON Web Token says so.

use std::sync::Arc;
use std::time::Duration;

use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, get_current_timestamp};
use serde::Deserialize;

/// Bytes of a token at most.
const TOKEN_BYTES_MAX: usize = 4096;

/// The longest time that a token counts for: a century.
const TIME_MAX: f64 = 3.2e9;

/// The claims of a token, signed by HS256. `subscribe` and `publish` are patterns of topics.
#[derive(Deserialize)]
struct Claims {
    sub: String,
    exp: f64,
    #[serde(default)]
    subscribe: Vec<String>,
    #[serde(default)]
    publish: Vec<String>,
}

/// The rights of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    pub user: Arc<str>,
    /// The time that its token has left; `None` without a token.
    pub time_left: Option<Duration>,
    subscribe: Vec<String>,
    publish: Vec<String>,
}

impl Rights {
    pub fn may_subscribe(&self, topic: &str) -> bool {
        self.subscribe.iter().any(|pattern| matches(pattern, topic))
    }

    pub fn may_publish(&self, topic: &str) -> bool {
        self.publish.iter().any(|pattern| matches(pattern, topic))
    }
}

/// True if a pattern matches a topic: `*` stands for a token, and `>` at the end for one or more.
fn matches(pattern: &str, topic: &str) -> bool {
    let (mut pattern, mut topic) = (pattern.split('.'), topic.split('.'));
    loop {
        match (pattern.next(), topic.next()) {
            (Some(">"), Some(_)) => return pattern.next().is_none(),
            (Some("*"), Some(_)) => {}
            (Some(token), Some(other)) if token == other => {}
            (None, None) => return true,
            _ => return false,
        }
    }
}

/// Whom the server believes.
#[derive(Clone)]
pub struct Tokens {
    key: Option<DecodingKey>,
    is_anonymous: bool,
}

impl Tokens {
    /// Those that this secret signed. Clients without a token may subscribe to everything if
    /// `is_anonymous`.
    pub fn new(secret: Option<&str>, is_anonymous: bool) -> Tokens {
        Tokens { key: secret.map(|secret| DecodingKey::from_secret(secret.as_bytes())), is_anonymous }
    }

    /// The rights of a client with this token.
    ///
    /// # Errors
    /// The reason why it may do nothing.
    pub fn rights(&self, token: Option<&str>) -> Result<Rights, &'static str> {
        let Some(token) = token else {
            return match self.is_anonymous {
                true => Ok(Rights {
                    user: "anonymous".into(),
                    time_left: None,
                    subscribe: vec![">".into()],
                    publish: Vec::new(),
                }),
                false => Err("a token is missing"),
            };
        };
        let key = self.key.as_ref().ok_or("this server takes no tokens")?;
        if token.len() > TOKEN_BYTES_MAX {
            return Err("the token is too long");
        }
        let mut validation = Validation::new(Algorithm::HS256);
        validation.leeway = 0;
        validation.validate_nbf = true;
        let claims = decode::<Claims>(token, key, &validation);
        let Claims { sub, exp, subscribe, publish } =
            claims.map_err(|_| "the token is forged, or expired, or none")?.claims;
        if sub.is_empty() || sub.len() > 64 || !sub.chars().all(|of| of.is_ascii_graphic()) {
            return Err("the token names no user");
        }
        let left = (exp - get_current_timestamp() as f64).clamp(0.0, TIME_MAX);
        let time_left = Some(Duration::from_secs_f64(left));
        Ok(Rights { user: sub.into(), time_left, subscribe, publish })
    }
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::{EncodingKey, Header, encode};
    use serde_json::{Value, json};

    use super::*;

    /// The year 2100.
    const LATER: u64 = 4_102_444_800;

    fn token(secret: &str, header: &Header, claims: &Value) -> String {
        encode(header, claims, &EncodingKey::from_secret(secret.as_bytes())).unwrap()
    }

    #[test]
    fn tokens_that_are_forged_or_expired_give_no_rights() {
        let tokens = Tokens::new(Some("secret"), false);
        let claims = json!({"sub": "ann", "exp": LATER, "subscribe": ["room.*"], "publish": ["a.>"]});
        let sound = token("secret", &Header::default(), &claims);
        let rights = tokens.rights(Some(&sound)).unwrap();
        assert_eq!(&*rights.user, "ann");
        assert!(rights.may_subscribe("room.7") && !rights.may_subscribe("room.7.x"));
        assert!(!rights.may_subscribe("room") && !rights.may_publish("room.7"));
        assert!(rights.may_publish("a.b.c") && !rights.may_publish("a"));

        let mut forged = sound.clone();
        forged.pop();
        let other = token("other", &Header::default(), &claims);
        let strong = token("secret", &Header::new(Algorithm::HS512), &claims);
        let of = |claims: Value| token("secret", &Header::default(), &claims);
        let expired = of(json!({"sub": "ann", "exp": 1000}));
        let early = of(json!({"sub": "ann", "exp": LATER, "nbf": LATER - 1}));
        let (endless, unnamed) = (of(json!({"sub": "ann"})), of(json!({"sub": "", "exp": LATER})));
        let long = "x".repeat(TOKEN_BYTES_MAX + 1);
        for token in [&forged, &other, &strong, &expired, &early, &endless, &unnamed, &long, "", "a.b.c"] {
            assert!(tokens.rights(Some(token)).is_err(), "{token}");
        }
        assert_eq!(tokens.rights(None), Err("a token is missing"));
        assert!(Tokens::new(None, true).rights(Some(&sound)).is_err());
    }

    #[test]
    fn client_without_a_token_may_read_if_the_server_says_so() {
        let rights = Tokens::new(Some("secret"), true).rights(None).unwrap();
        assert!(rights.may_subscribe("anything.at.all") && !rights.may_publish("anything"));
    }

    #[test]
    fn patterns_match_token_by_token() {
        let cases = [("a", "a"), ("*", "a"), (">", "a.b"), ("a.*.c", "a.b.c"), ("a.>", "a.b.c")];
        assert!(cases.iter().all(|(pattern, topic)| matches(pattern, topic)));
        let cases = [("a", "b"), ("*", "a.b"), ("a.>", "a"), ("a.>.c", "a.b.c"), ("a.*", "a"), ("", "a")];
        assert!(cases.iter().all(|(pattern, topic)| !matches(pattern, topic)));
    }
}
