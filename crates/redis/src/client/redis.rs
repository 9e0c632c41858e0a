//! The client.

use std::fmt;
use std::io;

use ringserve_server::net::Framed;
use ringserve_server::{Frame, Shard};
use ringserve_upstream::{Pipelined, Request, Upstream, UpstreamError};

use super::replies::{ConnectionReplies, has_reply};
use super::value::Value;
use crate::resp::Version;

/// The largest reply unless it is set: the largest string of Redis, and some room.
const REPLY_BYTES_MAX: usize = (512 << 20) + (64 << 10);

/// The commands of a [`RedisClient`] on each new connection, and its bounds.
///
/// ```
/// use ringserve::redis::RedisOptions;
///
/// let options = RedisOptions::default().user("ann").password("secret").database(2);
/// # let _ = options;
/// ```
#[derive(Clone)]
pub struct RedisOptions {
    user: Option<String>,
    password: Option<String>,
    database: u32,
    version: Version,
    reply_bytes_max: usize,
}

impl Default for RedisOptions {
    fn default() -> RedisOptions {
        RedisOptions {
            user: None,
            password: None,
            database: 0,
            version: Version::Two,
            reply_bytes_max: REPLY_BYTES_MAX,
        }
    }
}

impl RedisOptions {
    /// The user; `default` by default. It needs a password.
    pub fn user(self, user: impl Into<String>) -> RedisOptions {
        RedisOptions { user: Some(user.into()), ..self }
    }

    /// The password.
    pub fn password(self, password: impl Into<String>) -> RedisOptions {
        RedisOptions { password: Some(password.into()), ..self }
    }

    /// The database; 0 by default.
    pub fn database(self, database: u32) -> RedisOptions {
        RedisOptions { database, ..self }
    }

    /// The version of the protocol; 2 by default. Version 3 has maps, numbers with a point and
    /// more.
    pub fn version(self, version: Version) -> RedisOptions {
        RedisOptions { version, ..self }
    }

    /// The largest reply, at least 1 KiB; 512 MiB by default. A server can make the shard hold this
    /// much for one reply; it counts as
    /// [held](ringserve_server::limits::ServerLimits::held_bytes_max).
    pub fn reply_bytes_max(self, bytes: usize) -> RedisOptions {
        RedisOptions { reply_bytes_max: bytes.max(1 << 10), ..self }
    }

    /// The commands for a new connection.
    fn commands(&self) -> Vec<Vec<u8>> {
        let (user, database) = (self.user.as_deref().unwrap_or("default"), self.database.to_string());
        let login = self.password.as_deref().map(|password| ["AUTH", user, password]);
        let mut commands = Vec::new();
        match (self.version, login) {
            (Version::Three, login) => {
                commands.push(command(["HELLO", "3"].into_iter().chain(login.into_iter().flatten())))
            }
            // Servers before 6 know no users.
            (Version::Two, Some([auth, _, password])) if self.user.is_none() => {
                commands.push(command([auth, password]))
            }
            (Version::Two, Some(login)) => commands.push(command(login)),
            (Version::Two, None) => {}
        }
        if self.database > 0 {
            commands.push(command(["SELECT", &database]));
        }
        commands
    }
}

/// Without the password.
impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisOptions")
            .field("user", &self.user)
            .field("database", &self.database)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// A client of Redis on one shard. Clones share its connections. See the [module](crate::client).
///
/// Connections, balancing, checks and retries are those of its [`Upstream`], and of [`Pipelined`].
#[derive(Clone)]
pub struct RedisClient {
    connections: Pipelined<ConnectionReplies>,
}

impl RedisClient {
    /// A client of this upstream. Made in a factory.
    pub fn new(upstream: &Upstream, shard: &Shard, options: RedisOptions) -> RedisClient {
        let bytes_max = options.reply_bytes_max;
        let setup = async move |connection: &mut Framed<ConnectionReplies>| {
            for command in options.commands() {
                connection.queue(&command).map_err(io::Error::other)?;
                let Some(reply) = connection.next().await else {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                };
                match Reply::new(reply?) {
                    Ok(_) => {}
                    Err(RedisError::Refused(text)) => {
                        let text = format!("Redis says: {text}");
                        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
                    }
                    Err(RedisError::Upstream(error)) => return Err(error.into()),
                }
            }
            Ok(())
        };
        let connections = upstream.pipelined(shard, ConnectionReplies::default());
        let connections = connections.frame_bytes_max(bytes_max).setup(setup);
        RedisClient { connections }
    }

    /// Sends a command, once, and waits for its reply. A call that is dropped has sent it all the
    /// same, once it was polled.
    ///
    /// ```
    /// # use ringserve::redis::{RedisClient, RedisError};
    /// async fn visit(redis: &RedisClient, user: &str) -> Result<i64, RedisError> {
    ///     let reply = redis.command(["HINCRBY", user, "visits", "1"]).await?;
    ///     Ok(reply.value().integer().unwrap_or(0))
    /// }
    /// ```
    ///
    /// # Errors
    /// [`RedisError::Refused`] with the server's words, [`RedisError::Upstream`] without a reply:
    /// the command may have been carried out.
    /// A command without an argument is not sent; its error is `InvalidInput`.
    pub async fn command<A: AsRef<[u8]>>(
        &self,
        args: impl IntoIterator<Item = A>,
    ) -> Result<Reply, RedisError> {
        self.ask(Request::new(&command_with_reply(args)?)).await
    }

    /// The same for a command that may be carried out twice, such as one that reads: where its
    /// connection is lost it is sent again, as far as [`Retry`](ringserve_upstream::Retry) goes.
    ///
    /// # Errors
    /// Those of [`command`](RedisClient::command).
    pub async fn query<A: AsRef<[u8]>>(
        &self,
        args: impl IntoIterator<Item = A>,
    ) -> Result<Reply, RedisError> {
        self.ask(Request::new(&command_with_reply(args)?).idempotent()).await
    }

    async fn ask(&self, request: Request<'_>) -> Result<Reply, RedisError> {
        let frame = self.connections.ask(request).await.map_err(RedisError::Upstream)?;
        Reply::new(frame)
    }
}

impl fmt::Debug for RedisClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisClient").field(&self.connections).finish()
    }
}

/// Writes a command to which there is a reply. Without one the reply to the next command would be
/// taken for its own.
fn command_with_reply<A: AsRef<[u8]>>(args: impl IntoIterator<Item = A>) -> Result<Vec<u8>, RedisError> {
    let command = command(args);
    if has_reply(&command) {
        return Ok(command);
    }
    let error = io::Error::new(io::ErrorKind::InvalidInput, "a command of Redis has no argument");
    Err(RedisError::Upstream(UpstreamError::Failed(error)))
}

/// Writes a command: an array of strings.
fn command<A: AsRef<[u8]>>(args: impl IntoIterator<Item = A>) -> Vec<u8> {
    let (mut count, mut strings) = (0, Vec::new());
    for arg in args {
        let arg = arg.as_ref();
        count += 1;
        strings.push(b'$');
        strings.extend_from_slice(itoa::Buffer::new().format(arg.len()).as_bytes());
        strings.extend_from_slice(b"\r\n");
        strings.extend_from_slice(arg);
        strings.extend_from_slice(b"\r\n");
    }
    let mut command = Vec::with_capacity(strings.len() + 16);
    command.push(b'*');
    command.extend_from_slice(itoa::Buffer::new().format(count).as_bytes());
    command.extend_from_slice(b"\r\n");
    command.append(&mut strings);
    command
}

/// A reply. It pins a receive buffer, as each [`Frame`] does: copy what is kept.
pub struct Reply {
    frame: Frame,
}

impl Reply {
    /// Takes a reply that is no error.
    fn new(frame: Frame) -> Result<Reply, RedisError> {
        match Value::read(&frame) {
            Some(Value::Error(text)) => Err(RedisError::Refused(String::from_utf8_lossy(text).into_owned())),
            Some(_) => Ok(Reply { frame }),
            None => {
                let why = "a reply of Redis cannot be read";
                let error = io::Error::new(io::ErrorKind::InvalidData, why);
                Err(RedisError::Upstream(UpstreamError::Failed(error)))
            }
        }
    }

    /// The content of the reply. It is read with each call; elements of arrays are collected.
    pub fn value(&self) -> Value<'_> {
        Value::read(&self.frame).unwrap_or(Value::Null)
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reply").field(&self.value()).finish()
    }
}

/// The reason why a command has no reply.
#[non_exhaustive]
pub enum RedisError {
    /// There is no connection, or it was lost, or the time was over.
    Upstream(UpstreamError),
    /// The server's error, in its words: `WRONGTYPE ..`.
    Refused(String),
}

impl fmt::Display for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RedisError::Upstream(error) => error.fmt(f),
            RedisError::Refused(text) => write!(f, "Redis says: {text}"),
        }
    }
}

impl fmt::Debug for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for RedisError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RedisError::Upstream(error) => error.source(),
            RedisError::Refused(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_connections_say_who_and_where() {
        let said = |options: RedisOptions| {
            options.commands().into_iter().map(|one| String::from_utf8(one).unwrap()).collect::<Vec<_>>()
        };
        assert!(said(RedisOptions::default()).is_empty());
        assert_eq!(said(RedisOptions::default().password("p")), ["*2\r\n$4\r\nAUTH\r\n$1\r\np\r\n"]);
        assert_eq!(
            said(RedisOptions::default().user("a").password("p").database(3)),
            ["*3\r\n$4\r\nAUTH\r\n$1\r\na\r\n$1\r\np\r\n", "*2\r\n$6\r\nSELECT\r\n$1\r\n3\r\n"]
        );
        assert_eq!(
            said(RedisOptions::default().version(Version::Three).password("p")),
            ["*5\r\n$5\r\nHELLO\r\n$1\r\n3\r\n$4\r\nAUTH\r\n$7\r\ndefault\r\n$1\r\np\r\n"]
        );
    }
}
