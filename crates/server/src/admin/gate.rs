//! Which requests the endpoint answers.
//!
//! Any page that a browser shows may send requests to 127.0.0.1, so the address alone protects
//! nothing:
//!
//! | attempt | refused since |
//! |---|---|
//! | a page has its name resolve to 127.0.0.1, and then reads answers as its own (rebinding) | `Host` is not one of ours |
//! | a page posts a form, or fetches without reading | `X-Ringserve` is missing, which no form sends and a fetch only after a preflight, which is refused |
//! | the same from a page of another port of this machine | `Origin` is not the address that was asked |
//! | another machine asks | without a token the endpoint is at loopback or a Unix socket |

use std::net::IpAddr;

use hyper::Request;
use hyper::header::{AUTHORIZATION, HOST, HeaderName, ORIGIN};
use hyper::http::uri::Authority;
use subtle::ConstantTimeEq;

/// The header that requests with an effect have.
pub(super) const HEADER: HeaderName = HeaderName::from_static("x-ringserve");

/// The shortest token: 16 letters at random are 90 bits.
pub(super) const TOKEN_MIN: usize = 16;

/// Tokens for orders at most: all are compared for each request.
const TOKENS_MAX: usize = 16;

/// Characters of a token's name at most: it is in each line of the log about its orders.
const NAME_CHARS_MAX: usize = 40;

/// The names of the tokens that are given without one.
pub(super) const TOKEN: &str = "token";
const READ_TOKEN: &str = "read_token";

/// The names and the secret of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// In lower case.
    names: Vec<String>,
    ips: Vec<IpAddr>,
    tokens: Tokens,
}

/// The secrets of an endpoint. Without any, no request is asked for one.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    /// Of those who may read and give orders, each with its name.
    orders: Vec<(Box<str>, Box<str>)>,
    /// Of those who may read.
    reads: Option<Box<str>>,
}

impl Tokens {
    /// # Errors
    /// A sentence with the cause: one that is easily guessed, or that a header cannot have, or both
    /// are the same.
    pub(super) fn check(orders: Vec<(String, String)>, reads: Option<String>) -> Result<Tokens, String> {
        if orders.len() > TOKENS_MAX {
            return Err(format!("there are {} tokens; {TOKENS_MAX} is the most", orders.len()));
        }
        reads.iter().try_for_each(|token| check_token(token))?;
        for (number, (name, token)) in orders.iter().enumerate() {
            check_token(token)?;
            let is_name = |c: char| c.is_alphanumeric() || "-_.@".contains(c);
            if name.is_empty() || name.chars().count() > NAME_CHARS_MAX || !name.chars().all(is_name) {
                return Err(format!(
                    "the token's name {name:.60?} is none: it has 1 to {NAME_CHARS_MAX} letters, digits, -, _, . and @"
                ));
            }
            let before = &orders[..number];
            if before.iter().any(|(other, _)| other == name) {
                return Err(format!("two tokens have the name {name}"));
            }
            if let Some((other, _)) = before.iter().find(|(_, other)| other == token) {
                return Err(format!("the tokens {other} and {name} are the same"));
            }
            if reads.as_ref() == Some(token) {
                return Err("Admin::token and Admin::read_token are the same: give two, or the first alone"
                    .to_owned());
            }
        }
        let orders = orders.into_iter().map(|(name, token)| (name.into(), token.into()));
        Ok(Tokens { orders: orders.collect(), reads: reads.map(Into::into) })
    }

    /// True if there is one.
    pub(super) fn are_asked_for(&self) -> bool {
        !self.orders.is_empty() || self.reads.is_some()
    }
}

/// Refuses tokens that are easily guessed, or that a header cannot have.
///
/// # Errors
/// A sentence with the cause.
fn check_token(token: &str) -> Result<(), String> {
    if token.len() < TOKEN_MIN {
        return Err(format!(
            "the token has {} bytes: give one of {TOKEN_MIN} or more, at random",
            token.len()
        ));
    }
    match token.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(()),
        false => Err("the token has a byte that is no visible character of ASCII".to_owned()),
    }
}

/// The reason why a request is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GateError {
    /// Its `Host` is none of ours, or is missing or there twice.
    Name(String),
    /// The token is missing or wrong.
    Token,
    /// It has an effect, and its token is one for reading.
    ReadsOnly,
    /// It has an effect, and lacks the header by which that is meant.
    Header,
    /// It was sent by a page of another origin.
    Origin,
}

impl Gate {
    pub(super) fn new(
        names: impl IntoIterator<Item = String>,
        ips: impl IntoIterator<Item = IpAddr>,
        tokens: Tokens,
    ) -> Gate {
        let names = names.into_iter().chain(["localhost".to_owned()]);
        Gate { names: names.collect(), ips: ips.into_iter().collect(), tokens }
    }

    /// A name as hosts are compared with it: in lower case, without the dot of a name that is
    /// whole.
    ///
    /// # Errors
    /// A sentence with the cause, for a name that no `Host` can be.
    pub(super) fn read_name(name: &str) -> Result<String, String> {
        let said: String = name.chars().take(100).collect();
        let refused =
            |why: &str| format!("Admin::host_name({said:?}) {why}: give a name such as chat-1.internal");
        let authority: Authority = name.parse().map_err(|_| refused("is no name of a host"))?;
        if authority.as_str().contains('@') {
            return Err(refused("has a user"));
        }
        if authority.host().len() < name.len() {
            return Err(refused("has a port, and each port is answered to"));
        }
        if bare(authority.host()).parse::<IpAddr>().is_ok() {
            return Err(refused("is an address, and those at which the endpoint listens are known"));
        }
        Ok(plain(authority.host()))
    }

    /// Refuses a request that does not call the endpoint by one of its names.
    ///
    /// # Errors
    /// Which name it had.
    pub(super) fn check_name<B>(&self, request: &Request<B>) -> Result<(), GateError> {
        let name = called(request).map_err(|text| GateError::Name(text.to_owned()))?;
        let of_uri = request.uri().authority().is_none_or(|authority| self.is_ours(authority.as_str()));
        match self.is_ours(name) && of_uri {
            true => Ok(()),
            false => Err(GateError::Name(name.chars().take(100).collect())),
        }
    }

    /// Refuses a request without a token that allows it, if there is one. Returns the name of its
    /// token.
    ///
    /// # Errors
    /// It is missing or wrong, or allows less.
    pub(super) fn check_caller<B>(
        &self,
        request: &Request<B>,
        has_effect: bool,
    ) -> Result<Option<&str>, GateError> {
        if !self.tokens.are_asked_for() {
            return Ok(None);
        }
        let said = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let said = said.and_then(|value| value.split_once(' '));
        let said =
            said.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, said)| said.trim());
        let is =
            |token: &str| -> bool { said.is_some_and(|said| said.as_bytes().ct_eq(token.as_bytes()).into()) };
        // Each is compared, so that the time does not tell which one was nearly right.
        let names: Vec<&str> =
            self.tokens.orders.iter().filter(|(_, token)| is(token)).map(|(name, _)| &**name).collect();
        match (names.first(), self.tokens.reads.as_deref().is_some_and(is)) {
            (Some(name), _) => Ok(Some(name)),
            (None, true) if has_effect => Err(GateError::ReadsOnly),
            (None, true) => Ok(Some(READ_TOKEN)),
            (None, false) => Err(GateError::Token),
        }
    }

    /// Refuses a request with an effect that a page of another origin may have sent.
    ///
    /// # Errors
    /// The header that it lacks.
    pub(super) fn check_effect<B>(request: &Request<B>) -> Result<(), GateError> {
        let headers = request.headers();
        if headers.get(&HEADER).is_none_or(|value| value != "1") {
            return Err(GateError::Header);
        }
        let host = called(request).map_err(|_| GateError::Origin)?;
        let is_same = |origin: &str| {
            let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
            authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
        };
        let all_same = headers.get_all(ORIGIN).iter().all(|origin| origin.to_str().is_ok_and(is_same));
        if all_same { Ok(()) } else { Err(GateError::Origin) }
    }

    /// True for `localhost`, an address at which the endpoint listens, and names that were given;
    /// with any port, since tunnels have others. Where it listens at all addresses, each address
    /// may be its own: a name that resolves to it is none.
    fn is_ours(&self, authority: &str) -> bool {
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        if authority.as_str().contains('@') {
            return false;
        }
        match bare(authority.host()).parse::<IpAddr>() {
            Ok(ip) => self.ips.iter().any(|ours| ours.is_unspecified() || *ours == ip.to_canonical()),
            Err(_) => self.names.contains(&plain(authority.host())),
        }
    }
}

/// A host without the brackets of IPv6.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// A host as it is compared.
fn plain(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

/// The name by which a request calls this endpoint.
fn called<B>(request: &Request<B>) -> Result<&str, &'static str> {
    let mut all = request.headers().get_all(HOST).iter();
    match (all.next(), all.next()) {
        (Some(name), None) => name.to_str().map_err(|_| "bytes that are no text"),
        (None, _) => Err("nothing"),
        (Some(_), Some(_)) => Err("two things"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, token: &str) -> (String, String) {
        (name.to_owned(), token.to_owned())
    }

    fn gate(ips: &[&str]) -> Gate {
        let ips = ips.iter().map(|ip| ip.parse().unwrap());
        let tokens = Tokens::check(vec![named("token", "correct-horse-battery")], None).unwrap();
        Gate::new([Gate::read_name("Admin.Internal.").unwrap()], ips, tokens)
    }

    fn request(headers: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::builder().uri("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    #[test]
    fn endpoint_answers_to_its_own_names_alone() {
        let gate = gate(&["127.0.0.1", "::1"]);
        for (name, is_ours) in [
            ("localhost", true),
            ("LocalHost:9000", true),
            ("localhost.:1", true),
            ("127.0.0.1:9000", true),
            ("127.0.0.1", true),
            ("[::1]:9000", true),
            ("[::ffff:127.0.0.1]:9000", true),
            ("admin.internal:8080", true),
            ("ADMIN.internal.", true),
            ("127.0.0.2:9000", false),
            ("10.0.0.1", false),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example:9000", false),
            ("evil.example@localhost", false),
            ("localhost@127.0.0.1", false),
            ("localhost:9000:1", false),
            ("localhost/x", false),
            ("", false),
            ("2130706433", false),
            ("0x7f.1", false),
        ] {
            let found = gate.check_name(&request(&[("host", name)])).is_ok();
            assert_eq!(found, is_ours, "{name:?}");
        }
    }

    #[test]
    fn names_that_no_host_can_be_are_refused() {
        for (name, why) in [
            ("chat-1.internal:9000", "has a port"),
            ("10.1.2.3", "is an address"),
            ("[::1]", "is an address"),
            ("http://chat-1", "no name"),
            ("a b", "no name"),
            ("me@chat-1", "a user"),
            ("", "no name"),
        ] {
            let error = Gate::read_name(name).expect_err(name);
            assert!(error.contains(why), "{name:?}: {error}");
        }
    }

    #[test]
    fn name_is_there_once_and_in_the_target_too() {
        let gate = gate(&["127.0.0.1"]);
        let refused = |request| gate.check_name(&request).unwrap_err();
        assert_eq!(refused(request(&[])), GateError::Name("nothing".to_owned()));
        let two = request(&[("host", "localhost"), ("host", "localhost")]);
        assert_eq!(refused(two), GateError::Name("two things".to_owned()));
        let target = |uri: &str| Request::builder().uri(uri).header("host", "localhost").body(()).unwrap();
        assert_eq!(gate.check_name(&target("http://localhost:9000/")), Ok(()));
        assert!(gate.check_name(&target("http://evil.example/")).is_err());
        let long = "x".repeat(5000);
        assert_eq!(refused(request(&[("host", &long)])), GateError::Name("x".repeat(100)));
    }

    #[test]
    fn each_address_is_its_own_where_it_listens_at_all() {
        let gate = gate(&["0.0.0.0"]);
        assert_eq!(gate.check_name(&request(&[("host", "10.1.2.3:9000")])), Ok(()));
        assert!(gate.check_name(&request(&[("host", "evil.example")])).is_err());
    }

    #[test]
    fn token_is_asked_for() {
        let gate = gate(&["127.0.0.1"]);
        for (said, is_right) in [
            ("Bearer correct-horse-battery", true),
            ("bearer correct-horse-battery", true),
            ("Bearer correct-horse-batterz", false),
            ("Bearer correct-horse-batter", false),
            ("Bearer correct-horse-battery1", false),
            ("Basic correct-horse-battery", false),
            ("Bearer", false),
            ("Bearer ", false),
            ("correct-horse-battery", false),
        ] {
            for has_effect in [true, false] {
                let checked = gate.check_caller(&request(&[("authorization", said)]), has_effect);
                assert_eq!(checked.is_ok(), is_right, "{said}");
            }
        }
        assert_eq!(gate.check_caller(&request(&[]), false), Err(GateError::Token));
        assert_eq!(Gate::default().check_caller(&request(&[]), true), Ok(None));
    }

    #[test]
    fn token_for_reading_gives_no_orders() {
        let reads = Some("staple-staple-staple".to_owned());
        let gate = |orders: &[(String, String)]| Gate {
            tokens: Tokens::check(orders.to_vec(), reads.clone()).unwrap(),
            ..Gate::default()
        };
        let said = |gate: &Gate, token: &str, has_effect| {
            let found =
                gate.check_caller(&request(&[("authorization", &format!("Bearer {token}"))]), has_effect);
            found.map(|name| name.unwrap_or_default().to_owned())
        };
        let both = gate(&[named("anna", "correct-horse-battery"), named("deploy", "battery-horse-correct")]);
        for has_effect in [true, false] {
            assert_eq!(said(&both, "correct-horse-battery", has_effect), Ok("anna".to_owned()));
            assert_eq!(said(&both, "battery-horse-correct", has_effect), Ok("deploy".to_owned()));
            assert_eq!(said(&both, "staple-staple-stapler", has_effect), Err(GateError::Token));
        }
        // Without a token for orders no request gives any.
        for gate in [&both, &gate(&[])] {
            assert_eq!(said(gate, "staple-staple-staple", false), Ok("read_token".to_owned()));
            assert_eq!(said(gate, "staple-staple-staple", true), Err(GateError::ReadsOnly));
            assert_eq!(gate.check_caller(&request(&[]), true), Err(GateError::Token));
        }
    }

    #[test]
    fn weak_tokens_are_refused() {
        let checked = |orders: Option<&str>, reads: Option<&str>| {
            let orders = orders.map(|token| named("token", token)).into_iter().collect();
            Tokens::check(orders, reads.map(str::to_owned)).map(drop)
        };
        for check in [|token| (Some(token), None), |token| (None, Some(token))] {
            let checked = |token| {
                let (orders, reads) = check(token);
                checked(orders, reads)
            };
            assert!(checked("secret").unwrap_err().contains("6 bytes"));
            assert!(checked("").is_err());
            assert!(checked("with a space in it").is_err());
            assert!(checked("mit-umlaut-äääääää").is_err());
            assert_eq!(checked("0123456789abcdef"), Ok(()));
        }
        let same = checked(Some("0123456789abcdef"), Some("0123456789abcdef"));
        assert!(same.unwrap_err().contains("are the same"));
        let orders = |all: &[(&str, &str)]| {
            let all = all.iter().map(|(name, token)| named(name, token)).collect();
            Tokens::check(all, None).map(drop).unwrap_err()
        };
        let (one, other) = ("0123456789abcdef", "fedcba9876543210");
        assert!(orders(&[("a", one), ("a", other)]).contains("two tokens have the name a"));
        assert!(orders(&[("a", one), ("b", one)]).contains("a and b are the same"));
        for name in ["", "a b", "a\nb", &"a".repeat(41)] {
            assert!(orders(&[(name, one)]).contains("is none"), "{name:?}");
        }
    }

    #[test]
    fn effects_are_asked_for_on_purpose() {
        let with = |more: &[(&str, &str)]| {
            let all = [&[("host", "localhost:9000")], more].concat();
            Gate::check_effect(&request(&all))
        };
        let ours = ("x-ringserve", "1");
        assert_eq!(with(&[]), Err(GateError::Header));
        assert_eq!(with(&[("x-ringserve", "yes")]), Err(GateError::Header));
        assert_eq!(with(&[ours]), Ok(()), "a program sends no origin");
        for (origin, is_same) in [
            ("http://localhost:9000", true),
            ("https://LOCALHOST:9000", true),
            ("http://localhost:3000", false),
            ("http://localhost", false),
            ("http://evil.example", false),
            ("http://localhost:9000.evil.example", false),
            ("null", false),
            ("", false),
        ] {
            assert_eq!(with(&[ours, ("origin", origin)]).is_ok(), is_same, "{origin}");
        }
        let two = with(&[ours, ("origin", "http://localhost:9000"), ("origin", "http://evil.example")]);
        assert_eq!(two, Err(GateError::Origin));
    }
}
