//! Remote calls with a database behind them: a login first, then requests with ids, which run side
//! by side, each with a time limit.
//!
//!     cargo run --release -p example-rpc -- --user ann:secret
//!     python3 examples/rpc/client.py --token secret '{"method": "put", "key": "greeting", "value": "hello"}' \
//!         '{"method": "get", "key": "greeting"}'
//!
//! A frame is a length of four bytes, most significant first, and a JSON object. A reply has the
//! `id` that the peer gave its request, or null where none could be read, and a `result` or an
//! `error`. Replies come as requests are done, in any order.
//!
//! | method | parameters | result |
//! |---|---|---|
//! | `login` | `token` | the user's name; the first request of a connection, and only that |
//! | `put` | `key`, `value` | true |
//! | `get` | `key` | the value, or null |
//! | `wait` | `millis` | as many milliseconds later the same number |
//!
//! Each user has separate keys. A stranger sends small frames, has 10 s for its login, and its
//! first error ends its connection; a user's errors are replies. A query whose request is `too
//! late` runs to its end all the same.
//!
//! Queries block, so they run beside the shards: on one thread with one connection to SQLite, which
//! has one writer at a time anyway. They run in the order of their requests and wait in the
//! server's queue, which is bounded and says `busy`, not for a lock. A server that usually reads a
//! large file takes more threads, a connection for each, and SQLite's write-ahead log.

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use ringserve::framing::{FrameError, LengthPrefix};
use ringserve::limits::{ConnLimits, ServerLimits};
use ringserve::log::LogOptions;
use ringserve::service::{OpenCx, Refusal, Session};
use ringserve::task::BlockingError;
use ringserve::{Cx, Frame, Limits, Server, Service};
use rusqlite::{Connection, OptionalExtension, Row};
use serde::Deserialize;
use serde_json::{Value, json};

/// A server of remote calls over SQLite.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// A user and its token; any number of times.
    #[arg(long = "user", required = true, value_name = "NAME:TOKEN", value_parser = user)]
    users: Vec<(String, Arc<str>)>,
    /// File of the database; by default it is in memory.
    #[arg(long, default_value = ":memory:", value_name = "FILE")]
    database: PathBuf,
    /// Milliseconds a request may take.
    #[arg(long, default_value_t = 10_000, value_name = "MS")]
    timeout: u64,
    /// Queries that may wait for the database; further ones get the error that it is busy.
    #[arg(long, default_value_t = 1024, value_name = "N")]
    queries_max: usize,
}

/// A token, and the user it stands for.
fn user(arg: &str) -> Result<(String, Arc<str>), &'static str> {
    let (name, token) = arg.split_once(':').ok_or("a user is NAME:TOKEN")?;
    Ok((token.to_owned(), name.into()))
}

/// Bytes of a frame before the login: room for a token.
const STRANGER_FRAME_BYTES_MAX: usize = 512;
const LOGIN_TIME: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
struct Request {
    id: u64,
    /// Read apart, so that the error of a bad call has the id.
    #[serde(flatten)]
    call: Value,
}

#[derive(Deserialize)]
#[serde(tag = "method", rename_all = "lowercase")]
enum Call {
    Login { token: String },
    Put { key: String, value: String },
    Get { key: String },
    Wait { millis: u64 },
}

/// The content of a reply: a result, or an error.
type Outcome = Result<Value, String>;

fn parse(frame: &[u8]) -> (Option<u64>, Result<Call, String>) {
    match serde_json::from_slice(frame) {
        Ok(Request { id, call }) => (Some(id), Call::deserialize(call).map_err(|error| error.to_string())),
        Err(error) => (None, Err(error.to_string())),
    }
}

fn reply(cx: &Cx<'_, Conn>, id: Option<u64>, outcome: &Outcome) {
    let answer = match outcome {
        Ok(result) => json!({ "id": id, "result": result }),
        Err(error) => json!({ "id": id, "error": error }),
    };
    cx.reply(answer.to_string());
}

/// The identity of a peer.
#[derive(Clone)]
enum Who {
    Stranger,
    User(Arc<str>),
}

struct Conn {
    who: RefCell<Who>,
}

impl Session for Conn {}

/// One for each shard, with the same users and database.
#[derive(Clone)]
struct Rpc {
    /// By their tokens. The time of a look-up says nothing about them, since the map's hash has a
    /// random key.
    users: Arc<HashMap<String, Arc<str>>>,
    /// Locked by the one thread for queries.
    database: Arc<Mutex<Connection>>,
    timeout: Duration,
}

impl Rpc {
    fn new(args: &Args) -> rusqlite::Result<Rpc> {
        let db = Connection::open(&args.database)?;
        db.execute_batch("CREATE TABLE IF NOT EXISTS entries (user, key, value, PRIMARY KEY (user, key))")?;
        let users = Arc::new(args.users.iter().cloned().collect());
        let timeout = Duration::from_millis(args.timeout);
        Ok(Rpc { users, database: Arc::new(Mutex::new(db)), timeout })
    }

    /// Does not wait, so that requests sent together with the login find it done.
    fn login(&self, cx: &Cx<'_, Conn>, call: Result<Call, String>) -> Outcome {
        let Call::Login { token } = call? else { return Err("log in first".to_owned()) };
        let user = self.users.get(&token).ok_or("no such token")?;
        cx.set_limits(&ConnLimits::default().deadline(None)).map_err(|error| error.to_string())?;
        cx.session().who.replace(Who::User(user.clone()));
        Ok(json!(**user))
    }

    async fn run(&self, cx: &Cx<'_, Conn>, user: Arc<str>, call: Result<Call, String>) -> Outcome {
        match call? {
            Call::Login { .. } => Err("logged in already".to_owned()),
            Call::Wait { millis } => {
                cx.sleep(Duration::from_millis(millis)).await;
                Ok(json!(millis))
            }
            Call::Put { key, value } => {
                let sql = "INSERT OR REPLACE INTO entries VALUES (?1, ?2, ?3)";
                self.query(cx, move |db| Ok(json!(db.execute(sql, (&*user, key, value))? == 1))).await
            }
            Call::Get { key } => {
                let sql = "SELECT value FROM entries WHERE user = ?1 AND key = ?2";
                let text = |row: &Row<'_>| row.get::<_, String>(0);
                self.query(cx, move |db| Ok(json!(db.query_row(sql, (&*user, key), text).optional()?))).await
            }
        }
    }

    /// Runs a query on the thread for queries.
    async fn query<Q>(&self, cx: &Cx<'_, Conn>, query: Q) -> Outcome
    where
        Q: FnOnce(&Connection) -> rusqlite::Result<Value> + Send + 'static,
    {
        let database = self.database.clone();
        let lock = move || query(&database.lock().unwrap_or_else(PoisonError::into_inner));
        let error: Box<dyn Error> = match cx.shard().spawn_blocking(lock).await {
            Ok(Ok(value)) => return Ok(value),
            Err(BlockingError::Full) => return Err("busy".to_owned()),
            Ok(Err(error)) => error.into(),
            Err(error) => error.into(),
        };
        // The peer need not know what the database looks like.
        tracing::error!("a query failed: {error}");
        Err("the query failed".to_owned())
    }
}

impl Service for Rpc {
    type Session = Conn;
    type Error = String;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Conn, Refusal> {
        let stranger = ConnLimits::default().frame_bytes_max(STRANGER_FRAME_BYTES_MAX).deadline(LOGIN_TIME);
        opening.set_limits(&stranger).map_err(|error| Refusal::new(error.to_string()))?;
        Ok(Conn { who: RefCell::new(Who::Stranger) })
    }

    async fn call(&self, cx: &Cx<'_, Conn>, frame: Frame) -> Result<(), String> {
        let (id, call) = parse(&frame);
        // It would pin a receive buffer for as long as the request takes.
        drop(frame);
        let who = cx.session().who.borrow().clone();
        let outcome = match who {
            Who::Stranger => self.login(cx, call),
            Who::User(user) => {
                let outcome = cx.timeout(self.timeout, self.run(cx, user, call)).await;
                outcome.unwrap_or_else(|_elapsed| Err("too late".to_owned()))
            }
        };
        reply(cx, id, &outcome);
        match *cx.session().who.borrow() {
            // Its login failed. The error is logged, and closes the connection behind the reply.
            Who::Stranger => outcome.map(drop),
            Who::User(_) => Ok(()),
        }
    }

    fn malformed(&self, cx: &Cx<'_, Conn>, error: &FrameError) {
        reply(cx, None, &Err(error.to_string()));
    }
}

fn server(args: &Args) -> Server<LengthPrefix> {
    let limits = Limits::default()
        // So that 1024 queries that wait hold some 64 MiB at most.
        .frame_bytes_max(64 << 10)
        .calls_in_flight_max(64)
        .first_frame_timeout(None) // the login has a deadline
        // Each request has a limit, and is answered when that is over.
        .handler_timeout(None);
    let queries = ServerLimits::default().blocking_threads_max(1).blocking_queue_max(args.queries_max);
    Server::bind(args.listen).framing(LengthPrefix::default()).limits(limits).server_limits(queries)
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let rpc = Rpc::new(&args)?;
    Ok(server(&args).shards(args.shards).serve(move |_shard| rpc.clone())?)
}
