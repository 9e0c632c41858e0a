//! A receiver of mail (RFC 5321), which keeps each message in a file.
//!
//!     cargo run --release --example smtp -- --spool /tmp/mail
//!     swaks --server 127.0.0.1:2525 --from ann@a.example --to bob@b.example
//!
//! Commands are lines. After DATA comes a message, in pieces as they arrive, so a large one takes no memory: the framing keeps which
//! of the two it reads, and the call of DATA switches it. A message ends at `\r\n.\r\n` and nothing else; the dots that were put
//! before others are left out without a copy, since a piece begins behind each.
//!
//! TLS, AUTH and delivery to a mailbox are left out.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::{Cut, FramingState, HoldsState, TypedFraming};
use ringserve::framing::{EncodeError, FrameError, Framing, Lines, Outbox, Payload};
use ringserve::{Cx, Failure, Frame, Limits, Opening, Refusal, Server, Service, with_heads};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};

/// Recipients of one message at most: RFC 5321 wants 100 at least.
const RECIPIENTS_MAX: usize = 100;

/// A server that receives mail.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:2525", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// The directory for messages.
    #[arg(long, default_value = "spool", value_name = "DIR")]
    spool: PathBuf,
    /// Bytes of a message at most.
    #[arg(long, default_value_t = 32 << 20, value_name = "BYTES")]
    size: u64,
}

/// What the next bytes are.
#[derive(Clone, Copy, Debug, Default)]
enum Reads {
    #[default]
    Commands,
    Message {
        line_begins: bool,
    },
}

/// What a frame is: the end of a message has no bytes.
#[derive(Debug, Default)]
enum Part {
    #[default]
    Command,
    Piece,
    End,
}

/// Commands, and messages in pieces.
#[derive(Clone)]
struct Smtp;

/// 512 bytes by RFC 5321, and what extensions add to MAIL and RCPT.
const COMMANDS: Lines = Lines::crlf().bytes_max(1024);

impl TypedFraming for Smtp {
    type State = Reads;
    type Head = Part;

    fn cut(&self, reads: &mut Reads, bytes: &[u8], scanned: usize) -> Result<Cut<Part>, FrameError> {
        let Reads::Message { line_begins } = *reads else {
            return Ok(COMMANDS.decode(bytes, scanned)?.with_head(Part::Command));
        };
        if line_begins && bytes.starts_with(b".\r\n") {
            *reads = Reads::Commands;
            return Ok(Cut::Frame { skip: 3, len: 0, consumed: 3, head: Part::End });
        } else if line_begins && b".\r\n".starts_with(bytes) {
            return Ok(Cut::More(3 - bytes.len()));
        }
        let skip = usize::from(line_begins && bytes[0] == b'.');
        // Up to a line that begins with a dot; what may be the first half of a line's end waits for the other.
        let dot = bytes[skip..].windows(3).position(|window| window == b"\r\n.").map(|at| skip + at + 2);
        let consumed = dot.unwrap_or(bytes.len() - usize::from(bytes.ends_with(b"\r")));
        if consumed == 0 {
            return Ok(Cut::More(1));
        }
        *reads = Reads::Message { line_begins: bytes[..consumed].ends_with(b"\r\n") };
        Ok(Cut::Piece { skip, len: consumed - skip, consumed, head: Part::Piece })
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        COMMANDS.encode(payload, out)
    }
}

/// What a peer has said so far.
#[derive(Default)]
struct Session {
    reads: FramingState<Reads>,
    greeted: Cell<bool>,
    sender: RefCell<Option<String>>,
    recipients: RefCell<Vec<String>>,
    /// Of the message that is being received, unless it is too large.
    draft: RefCell<Option<Draft>>,
}

impl HoldsState<Reads> for Session {
    fn framing_state(&self) -> &FramingState<Reads> {
        &self.reads
    }
}

/// The file of a message that is being received, and how much more of it may come. The file goes with this, unless it is kept.
struct Draft {
    path: PathBuf,
    file: File,
    left: u64,
}

impl Draft {
    fn write(mut self, piece: &[u8]) -> io::Result<Draft> {
        self.file.write_all(piece)?;
        Ok(self)
    }

    /// When this returns, the message is on the disk.
    fn keep(self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, self.path.with_extension("eml"))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

struct Receiver {
    spool: PathBuf,
    bytes_max: u64,
}

impl Receiver {
    async fn command(&self, cx: &Cx<'_, Session>, line: &str) -> Result<&'static str, Box<dyn Error>> {
        let Session { greeted, sender, recipients, draft, .. } = cx.session();
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let verb = verb.to_ascii_uppercase();
        if matches!(&*verb, "HELO" | "EHLO" | "RSET") {
            sender.take();
            recipients.take();
        }
        Ok(match &*verb {
            "HELO" | "EHLO" if rest.is_empty() => "501 who are you?",
            "HELO" | "EHLO" => {
                greeted.set(true);
                if verb == "HELO" {
                    return Ok("250 hello");
                }
                cx.reply(format!("250-hello\r\n250-SIZE {}\r\n250-8BITMIME", self.bytes_max));
                "250 PIPELINING"
            }
            "NOOP" | "RSET" => "250 ok",
            "QUIT" => {
                cx.close();
                "221 bye"
            }
            "MAIL" if !greeted.get() => "503 EHLO first",
            "MAIL" if sender.borrow().is_some() => "503 there is a sender",
            "MAIL" => match path_of("FROM:", rest) {
                Some((_, params)) if size_of(params) > self.bytes_max => "552 too large",
                Some((path, _)) => {
                    sender.replace(Some(path.to_owned()));
                    "250 ok"
                }
                None => "501 MAIL FROM:<sender>",
            },
            "RCPT" if sender.borrow().is_none() => "503 MAIL first",
            "RCPT" if recipients.borrow().len() >= RECIPIENTS_MAX => "452 too many",
            "RCPT" => match path_of("TO:", rest).filter(|(path, _)| !path.is_empty()) {
                Some((path, _)) => {
                    recipients.borrow_mut().push(path.to_owned());
                    "250 ok"
                }
                None => "501 RCPT TO:<recipient>",
            },
            "DATA" if recipients.borrow().is_empty() => "503 RCPT first",
            "DATA" => {
                let (from, to) = (sender.take().unwrap_or_default(), recipients.take().join(", "));
                let path = self.spool.join(format!("{:016x}.part", cx.shard().random()));
                let left = self.bytes_max;
                let begin = move || {
                    let file = File::create_new(&path)?;
                    let envelope = format!("X-Sender: {from}\r\nX-Recipients: {to}\r\n");
                    Draft { path, file, left }.write(envelope.as_bytes())
                };
                draft.replace(Some(cx.shard().spawn_blocking(begin).await??));
                // What was received behind the line of this command is the message.
                cx.switch(Reads::Message { line_begins: true });
                "354 end with a dot"
            }
            _ => "500 what?",
        })
    }

    /// No further piece is received until this one is written. One too many is read to its end, where the answer is awaited.
    async fn piece(&self, cx: &Cx<'_, Session>, piece: Vec<u8>) -> Result<(), Box<dyn Error>> {
        let draft = cx.session().draft.take();
        if let Some(mut draft) = draft.filter(|draft| draft.left >= piece.len() as u64) {
            draft.left -= piece.len() as u64;
            let draft = cx.shard().spawn_blocking(move || draft.write(&piece)).await??;
            cx.session().draft.replace(Some(draft));
        }
        Ok(())
    }

    async fn end(&self, cx: &Cx<'_, Session>) -> Result<&'static str, Box<dyn Error>> {
        let Some(draft) = cx.session().draft.take() else { return Ok("552 too large") };
        cx.shard().spawn_blocking(|| draft.keep()).await??;
        Ok("250 kept")
    }
}

/// What stands between `<` and `>` behind a name in any case, and the parameters behind that.
fn path_of<'a>(name: &str, text: &'a str) -> Option<(&'a str, &'a str)> {
    let (found, rest) = text.split_at_checked(name.len())?;
    let (path, params) = rest.trim_start().strip_prefix('<')?.split_once('>')?;
    let is_sound = found.eq_ignore_ascii_case(name) && !path.contains(|c: char| c.is_control() || c == '<');
    is_sound.then_some((path, params))
}

/// What a sender says that its message has; 0 if it does not.
fn size_of(params: &str) -> u64 {
    params
        .to_ascii_uppercase()
        .split(' ')
        .find_map(|param| param.strip_prefix("SIZE=")?.parse().ok())
        .unwrap_or(0)
}

impl Service<Part> for Receiver {
    type Session = Session;
    type Error = Box<dyn Error>;

    async fn open(&self, opening: &Opening<'_>) -> Result<Session, Refusal> {
        opening.reply("220 ringserve ESMTP");
        Ok(Session::default())
    }

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame<Part>) -> Result<(), Box<dyn Error>> {
        cx.reply(match frame.head() {
            Part::Piece => return self.piece(cx, frame.to_vec()).await,
            Part::End => self.end(cx).await?,
            Part::Command => self.command(cx, String::from_utf8_lossy(&frame).trim_end()).await?,
        });
        Ok(())
    }

    fn malformed(&self, cx: &Cx<'_, Session>, _: &FrameError) {
        cx.reply("500 line too long");
    }

    fn failed(&self, cx: &Cx<'_, Session>, _: &Failure<'_, Box<dyn Error>>) {
        cx.reply("421 try again later");
    }
}

/// A peer may think for five minutes, as RFC 5321 says.
fn limits() -> Limits {
    Limits::default().frame_bytes_max(64 << 10).idle_timeout(Some(Duration::from_secs(300)))
}

fn main() -> Result<(), Box<dyn Error>> {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let Args { listen, shards, spool, size } = Args::parse();
    fs::create_dir_all(&spool)?;
    let server = Server::bind(listen).framing(Smtp).limits(limits()).shards(shards);
    Ok(server.serve(move |_shard| with_heads(Receiver { spool: spool.clone(), bytes_max: size }))?)
}

#[cfg(test)]
#[path = "smtp/tests.rs"]
mod tests;
