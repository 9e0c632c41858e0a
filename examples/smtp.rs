//! A receiver of mail (RFC 5321), which keeps each message in a file.
//!
//!     cargo run --release --example smtp -- --spool /tmp/mail
//!     swaks --server 127.0.0.1:2525 --from ann@a.example --to bob@b.example
//!
//! Commands are lines. After DATA comes a message, in pieces as they arrive, so a large one takes no memory: the call of DATA switches
//! the framing ([`DotStuffed`]) to it. TLS, AUTH and delivery to a mailbox are left out.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::{DotPart, DotState, DotStuffed, FrameError, FramingState, Lines};
use ringserve::log::LogOptions;
use ringserve::{Cx, Failure, Frame, Limits, Opening, Refusal, Server, Service, with_heads};

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
    /// Bytes of a message at most.
    #[arg(long, default_value_t = 32 << 20, value_name = "BYTES")]
    size: u64,
}

/// Commands, of 512 bytes by RFC 5321 and what extensions add to MAIL and RCPT, and messages.
const SMTP: DotStuffed = DotStuffed::new(Lines::crlf().bytes_max(1024));

/// What comes next, and what the peer has said so far.
type Session = (FramingState<DotState>, Mail);

#[derive(Default)]
struct Mail {
    greeted: Cell<bool>,
    sender: RefCell<Option<String>>,
    recipients: RefCell<Vec<String>>,
    /// Of the message that is being received, unless it is too large.
    draft: RefCell<Option<Draft>>,
}

/// The file of a message that is being received, and how much more of it may come. The file goes with this, unless it is kept.
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

impl Receiver {
    /// A peer may think for five minutes, as RFC 5321 says.
    fn server(&self) -> Server<DotStuffed> {
        let limits = Limits::default().frame_bytes_max(64 << 10).idle_timeout(Some(Duration::from_secs(300)));
        Server::bind(self.listen).framing(SMTP).limits(limits).shards(self.shards)
    }

    async fn command(&self, cx: &Cx<'_, Session>, line: &str) -> Result<&'static str, Box<dyn Error>> {
        let (_, Mail { greeted, sender, recipients, draft }) = cx.session();
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        let verb = verb.to_ascii_uppercase();
        if matches!(&*verb, "HELO" | "EHLO" | "RSET") {
            drop((sender.take(), recipients.take()));
        }
        Ok(match &*verb {
            "HELO" | "EHLO" if rest.is_empty() => "501 who are you?",
            "HELO" | "EHLO" => {
                greeted.set(true);
                if verb == "HELO" {
                    return Ok("250 hello");
                }
                cx.reply(format!("250-hello\r\n250-SIZE {}\r\n250-8BITMIME", self.size));
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
                Some((_, size)) if size > self.size => "552 too large",
                Some((path, _)) => {
                    sender.replace(Some(path.to_owned()));
                    "250 ok"
                }
                None => "501 MAIL FROM:<sender>",
            },
            "RCPT" if sender.borrow().is_none() => "503 MAIL first",
            // RFC 5321 wants room for as many at least.
            "RCPT" if recipients.borrow().len() >= 100 => "452 too many",
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
                let left = self.size;
                let begin = move || -> io::Result<Draft> {
                    let mut draft = Draft { file: File::create_new(&path)?, path, left };
                    write!(draft.file, "X-Sender: {from}\r\nX-Recipients: {to}\r\n")?;
                    Ok(draft)
                };
                draft.replace(Some(cx.shard().spawn_blocking(begin).await??));
                // What was received behind the line of this command is the message.
                cx.switch(DotState::TEXT);
                "354 end with a dot"
            }
            _ => "500 what?",
        })
    }

    /// No further piece is received until this one is written. One too many is read to its end, where the answer is awaited.
    async fn piece(&self, cx: &Cx<'_, Session>, piece: Vec<u8>) -> Result<(), Box<dyn Error>> {
        let draft = &cx.session().1.draft;
        if let Some(mut file) = draft.take().filter(|draft| draft.left >= piece.len() as u64) {
            file.left -= piece.len() as u64;
            let write = move || file.file.write_all(&piece).map(|()| file);
            draft.replace(Some(cx.shard().spawn_blocking(write).await??));
        }
        Ok(())
    }

    /// When this answers, the message is on the disk.
    async fn end(&self, cx: &Cx<'_, Session>) -> Result<&'static str, Box<dyn Error>> {
        let Some(draft) = cx.session().1.draft.take() else { return Ok("552 too large") };
        let kept = draft.path.with_extension("eml");
        let keep = move || draft.file.sync_all().and_then(|()| fs::rename(&draft.path, kept));
        cx.shard().spawn_blocking(keep).await??;
        Ok("250 kept")
    }
}

/// What stands between `<` and `>` behind a name in any case, and the size that the message will have, 0 if that is not told.
fn path_of<'a>(name: &str, text: &'a str) -> Option<(&'a str, u64)> {
    let (found, rest) = text.split_at_checked(name.len())?;
    let (path, params) = rest.trim_start().strip_prefix('<')?.split_once('>')?;
    let params = params.to_ascii_uppercase();
    let size = params.split(' ').find_map(|param| param.strip_prefix("SIZE=")?.parse().ok());
    let is_sound = found.eq_ignore_ascii_case(name) && !path.contains(|c: char| c.is_control() || c == '<');
    is_sound.then_some((path, size.unwrap_or(0)))
}

impl Service<DotPart> for Receiver {
    type Session = Session;
    type Error = Box<dyn Error>;

    async fn open(&self, opening: &Opening<'_>) -> Result<Session, Refusal> {
        opening.reply("220 ringserve ESMTP");
        Ok(Session::default())
    }

    async fn call(&self, cx: &Cx<'_, Session>, frame: Frame<DotPart>) -> Result<(), Box<dyn Error>> {
        cx.reply(match frame.head() {
            DotPart::Piece => return self.piece(cx, frame.to_vec()).await,
            DotPart::End => self.end(cx).await?,
            DotPart::Line => self.command(cx, String::from_utf8_lossy(&frame).trim_end()).await?,
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

fn main() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let receiver = Receiver::parse();
    fs::create_dir_all(&receiver.spool)?;
    Ok(receiver.server().serve(move |_shard| with_heads(receiver.clone()))?)
}

#[cfg(test)]
#[path = "smtp/tests.rs"]
mod tests;
