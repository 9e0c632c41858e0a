//! A receiver of mail (RFC 5321), which keeps each message in a file.
//!
//!     cargo run --release --example smtp -- --spool /tmp/mail
//!     swaks --server 127.0.0.1:2525 --from ann@a.example --to bob@b.example
//!
//! Commands are lines. After DATA comes a message, in pieces as they arrive, so a large one takes
//! no memory: the call of DATA switches the framing ([`DotStuffed`]) to it. `smtp/STANDARD.md`
//! lists RFC 5321 and RFC 1870, with a test for each row.
//!
//! * A message is accepted for any recipient, and becomes a file that begins with `Return-Path`,
//!   `X-Recipients` and `Received`. A temporary failure of this host is answered with 451 or 452,
//!   and the client tries again.
//! * A peer that is silent for five minutes receives 421. So does each peer when the server ends,
//!   one in the middle of a message once that is answered.
//! * Left out: TLS, AUTH, relaying and delivery to mailboxes, so VRFY reveals nothing (252), and
//!   EXPN, TURN and 251 do not exist; bounces, which belong to delivery; look-ups of names, by
//!   which no peer is refused. A line of more than 1024 bytes ends the connection (500 and 421),
//!   and so does a line or a message that comes with less than 240 bytes a second for ten seconds.
//!   A bare LF ends a command, as `nc` sends it, and never a line of a message.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use ringserve::framing::{DotPart, DotState, DotStuffed, FrameError, FramingState, Lines};
use ringserve::log::LogOptions;
use ringserve::service::{Failure, OpenCx, Refusal, with_heads};
use ringserve::{Cx, Frame, Limits, Server, Service};
use tracing::warn;

use crate::address::Addressed;

#[path = "smtp/address.rs"]
mod address;

/// A server that receives mail.
#[derive(Clone, Parser)]
struct Receiver {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:2525", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// The directory for messages.
    #[arg(long, default_value = "spool", value_name = "DIR")]
    spool: PathBuf,
    /// The most bytes of a message; 0 for no limit but the disk's. The standard requires 65536 at
    /// least.
    #[arg(long, default_value_t = 32 << 20, value_name = "BYTES")]
    size: u64,
    /// The domain of this host, as it calls itself.
    #[arg(long, default_value = "localhost", value_name = "DOMAIN")]
    name: String,
}

/// Commands, of 512 bytes by RFC 5321 and what extensions add to MAIL and RCPT, and messages.
const SMTP: DotStuffed = DotStuffed::new(Lines::crlf().bytes_max(1024));

/// Time without a command after which a peer is sent away: RFC 5321, 4.5.3.2.7, requires no less.
const PATIENCE: Duration = Duration::from_secs(300);

/// The answer to a message above `--size`.
const TOO_LARGE: &str = "552 too large";

/// The kind of bytes that come next, and the peer's commands so far.
type Session = (FramingState<DotState>, Mail);

#[derive(Default)]
struct Mail {
    /// The name that the peer gave, and the protocol that follows from its greeting.
    hello: RefCell<Option<(String, &'static str)>>,
    sender: RefCell<Option<String>>,
    recipients: RefCell<Vec<String>>,
    /// From DATA until its message is answered.
    is_in_text: Cell<bool>,
    /// The message that is being received, unless it is not kept: then its end is answered with the
    /// refusal.
    draft: RefCell<Option<Draft>>,
    refusal: Cell<&'static str>,
}

/// The file of a message that is being received, and how much more of it may come. The file is
/// deleted with this, unless it is kept.
struct Draft {
    path: PathBuf,
    file: File,
    left: u64,
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

type SmtpCx<'a> = Cx<'a, Session>;

impl Receiver {
    fn server(&self) -> Server<DotStuffed> {
        // Its heartbeat sends a silent peer away. The first command has as much time.
        let limits = Limits::default().frame_bytes_max(64 << 10).first_frame_timeout(None);
        let limits = limits.heartbeat_interval(PATIENCE);
        Server::bind(self.listen).framing(SMTP).limits(limits).shards(self.shards)
    }

    fn size_max(&self) -> u64 {
        if self.size == 0 { u64::MAX } else { self.size }
    }

    async fn command(&self, cx: &SmtpCx<'_>, line: &str) -> String {
        let (_, mail) = cx.session();
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let verb = verb.to_ascii_uppercase();
        let is_alone = line.len() == verb.len();
        let said = match &*verb {
            // A byte that is not text could be taken for the end of a line by a later reader.
            _ if line.bytes().any(|byte| !(b' '..=b'~').contains(&byte)) => {
                Err("500 a command is printable ASCII")
            }
            "HELO" | "EHLO" => return self.hello(mail, &verb, rest),
            "NOOP" => Ok("250 ok"),
            "HELP" => Ok("214 EHLO HELO MAIL RCPT DATA RSET NOOP VRFY HELP QUIT"),
            "VRFY" if is_alone => Err("501 VRFY whom?"),
            "VRFY" => Ok("252 send mail and see"),
            "EXPN" | "TURN" | "SEND" | "SOML" | "SAML" | "STARTTLS" | "AUTH" | "BDAT" | "ETRN" => {
                Err("502 not here")
            }
            "RSET" | "DATA" | "QUIT" if !is_alone => Err("501 nothing belongs behind it"),
            "RSET" => {
                drop((mail.sender.take(), mail.recipients.take()));
                Ok("250 ok")
            }
            "QUIT" => {
                cx.close();
                return format!("221 {} bye", self.name);
            }
            "MAIL" => self.mail(mail, rest),
            "RCPT" => mail.recipient(rest),
            "DATA" if mail.recipients.borrow().is_empty() => Err("503 RCPT first"),
            "DATA" => self.data(cx).await,
            _ => Err("500 what?"),
        };
        said.unwrap_or_else(|refusal| refusal).to_owned()
    }

    /// Handles a greeting. A refused one changes nothing.
    fn hello(&self, mail: &Mail, verb: &str, name: &str) -> String {
        if name.trim().is_empty() || name.trim().contains(' ') {
            return "501 who are you?".to_owned();
        }
        drop((mail.sender.take(), mail.recipients.take()));
        let (host, size) = (&self.name, self.size);
        let (protocol, said) = match verb {
            "HELO" => ("SMTP", format!("250 {host}")),
            _ => ("ESMTP", format!("250-{host}\r\n250-SIZE {size}\r\n250-8BITMIME\r\n250 PIPELINING")),
        };
        mail.hello.replace(Some((name.trim().to_owned(), protocol)));
        said
    }

    fn mail(&self, mail: &Mail, rest: &str) -> Result<&'static str, &'static str> {
        if mail.hello.borrow().is_none() {
            return Err("503 EHLO first");
        }
        if mail.sender.borrow().is_some() {
            return Err("503 there is a sender");
        }
        let Addressed { mailbox, params } = Addressed::read("FROM:", rest).ok_or("501 MAIL FROM:<sender>")?;
        if !mailbox.is_empty() && !mailbox.contains('@') {
            return Err("501 a sender has a domain");
        }
        let (mut size, mut seen) = (0, Vec::new());
        for (name, value) in params {
            let (name, value) = (name.to_ascii_uppercase(), value.unwrap_or_default().to_ascii_uppercase());
            match (&*name, &*value) {
                ("SIZE", digits)
                    if (1..=20).contains(&digits.len())
                        && digits.bytes().all(|byte| byte.is_ascii_digit()) =>
                {
                    // Twenty digits may be more than any message has.
                    size = digits.parse().unwrap_or(u64::MAX);
                }
                ("BODY", "7BIT" | "8BITMIME") => {}
                ("SIZE" | "BODY", _) => return Err("501 not a value of that"),
                _ => return Err("555 no such parameter"),
            }
            if seen.contains(&name) {
                return Err("501 twice");
            }
            seen.push(name);
        }
        if size > self.size_max() {
            return Err(TOO_LARGE);
        }
        mail.sender.replace(Some(mailbox.to_owned()));
        Ok("250 ok")
    }

    async fn data(&self, cx: &SmtpCx<'_>) -> Result<&'static str, &'static str> {
        let (_, mail) = cx.session();
        let (from, to) = (mail.sender.take().unwrap_or_default(), mail.recipients.take().join(", "));
        let id = cx.shard().random();
        let path = self.spool.join(format!("{id:016x}.part"));
        let (hello, protocol) = mail.hello.borrow().clone().unwrap_or_default();
        let client = cx.peer().addr().map(|addr| literal(addr.ip())).unwrap_or_default();
        let (host, left) = (self.name.clone(), self.size_max());
        mail.is_in_text.set(true);
        let begun = on_disk(cx, move || {
            let mut draft = Draft { file: File::create_new(&path)?, path, left };
            let date = date(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
            let by = format!("by {host} with {protocol} id {id:016x}");
            write!(draft.file, "Return-Path: <{from}>\r\nX-Recipients: {to}\r\n")?;
            write!(draft.file, "Received: from {hello} ({client})\r\n\t{by}; {date}\r\n")?;
            Ok(draft)
        });
        let draft = begun.await.inspect_err(|_| mail.is_in_text.set(false))?;
        mail.draft.replace(Some(draft));
        // Bytes received after the line of this command are the message.
        cx.set_framing_state(DotState::TEXT);
        Ok("354 end with a dot")
    }

    /// Writes a piece. No further one is received until it is written. A message that is not kept
    /// is read to its end, where the answer is awaited.
    async fn piece(&self, cx: &SmtpCx<'_>, piece: Vec<u8>) {
        let (_, mail) = cx.session();
        let Some(mut draft) = mail.draft.take() else { return };
        let Some(left) = draft.left.checked_sub(piece.len() as u64) else {
            return mail.refusal.set(TOO_LARGE);
        };
        draft.left = left;
        match on_disk(cx, move || draft.file.write_all(&piece).map(|()| draft)).await {
            Ok(draft) => drop(mail.draft.replace(Some(draft))),
            Err(refusal) => mail.refusal.set(refusal),
        }
    }

    /// Ends a message. When this answers, the message is on the disk, under its final name.
    async fn end(&self, cx: &SmtpCx<'_>) -> String {
        let (_, mail) = cx.session();
        let said = match mail.draft.take() {
            None => Err(mail.refusal.get()),
            Some(draft) => {
                let (kept, spool) = (draft.path.with_extension("eml"), self.spool.clone());
                let keep = move || {
                    draft.file.sync_all()?;
                    fs::rename(&draft.path, kept)?;
                    File::open(spool)?.sync_all()
                };
                on_disk(cx, keep).await.map(|()| "250 kept")
            }
        };
        mail.is_in_text.set(false);
        said.unwrap_or_else(|refusal| refusal).to_owned()
    }

    /// The message that a peer receives before the server closes the connection.
    fn leave(&self, cx: &SmtpCx<'_>) {
        cx.reply(format!("421 {} closes", self.name));
        cx.close();
    }
}

impl Mail {
    fn recipient(&self, rest: &str) -> Result<&'static str, &'static str> {
        if self.sender.borrow().is_none() {
            return Err("503 MAIL first");
        }
        let read = Addressed::read("TO:", rest).filter(|read| !read.mailbox.is_empty());
        let Addressed { mailbox, params } = read.ok_or("501 RCPT TO:<recipient>")?;
        if !params.is_empty() {
            return Err("555 no such parameter");
        }
        // RFC 5321 requires room for at least as many.
        if self.recipients.borrow().len() >= 100 {
            return Err("452 too many");
        }
        self.recipients.borrow_mut().push(mailbox.to_owned());
        Ok("250 ok")
    }
}

/// Runs `work` where it may block. A failure is this host's, and no verdict on the message: the
/// client should try again.
async fn on_disk<T: Send + 'static>(
    cx: &SmtpCx<'_>,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, &'static str> {
    let done = cx.shard().spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    done.map_err(|error| {
        warn!("a message is not kept: {error}");
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "452 no room now",
            _ => "451 try again later",
        }
    })
}

/// An address in the form that replaces a domain.
fn literal(ip: IpAddr) -> String {
    if ip.is_ipv4() { format!("[{ip}]") } else { format!("[IPv6:{ip}]") }
}

/// Seconds since 1970 in the form of RFC 5322, 3.3.
fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Counted from March on, which begins a year of the Gregorian calendar whose leap day is its
    // last; 400 of them have 146 097 days.
    let (era, day) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, is_next) = (day - (153 * month + 2) / 5 + 1, month >= 10);
    let year = era * 400 + year + u64::from(is_next);
    let weekday = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][days as usize % 7];
    let month =
        ["Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec", "Jan", "Feb"][month as usize];
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{weekday}, {day} {month} {year} {hour:02}:{minute:02}:{second:02} +0000")
}

impl Service<DotPart> for Receiver {
    type Session = Session;
    type Error = Box<dyn Error>;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Session, Refusal> {
        opening.reply(format!("220 {} ESMTP ringserve", self.name));
        Ok(Session::default())
    }

    async fn call(&self, cx: &SmtpCx<'_>, frame: Frame<DotPart>) -> Result<(), Box<dyn Error>> {
        cx.reply(match frame.head() {
            DotPart::Piece => {
                self.piece(cx, frame.to_vec()).await;
                return Ok(());
            }
            DotPart::End => self.end(cx).await,
            DotPart::Line => self.command(cx, String::from_utf8_lossy(&frame).trim_end()).await,
        });
        if cx.is_draining() && !cx.session().1.is_in_text.get() && !cx.is_closed() {
            self.leave(cx);
        }
        Ok(())
    }

    fn malformed(&self, cx: &SmtpCx<'_>, _: &FrameError) {
        cx.reply("500 line too long");
        self.leave(cx);
    }

    fn failed(&self, cx: &SmtpCx<'_>, _: &Failure<'_, Box<dyn Error>>) {
        self.leave(cx);
    }

    /// A message that is on its way is received to its end, and answered.
    fn draining(&self, cx: &SmtpCx<'_>) {
        if cx.session().1.is_in_text.get() { cx.hold_open() } else { self.leave(cx) }
    }

    fn heartbeat(&self, cx: &SmtpCx<'_>) {
        self.leave(cx);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let receiver = Receiver::parse();
    fs::create_dir_all(&receiver.spool)?;
    Ok(receiver.server().serve(move |_shard| with_heads(receiver.clone()))?)
}

#[cfg(test)]
#[path = "smtp/tests.rs"]
mod tests;
