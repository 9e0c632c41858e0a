use std::env;
use std::process;
use std::rc::Rc;

use ringserve::framing::encode_to_vec;
use ringserve::testing::{ClientStream, Faults, Sim};

use super::*;

/// A directory that goes with the test.
struct Spool(PathBuf);

impl Spool {
    fn new(name: &str) -> Rc<Spool> {
        let path = env::temp_dir().join(format!("ringserve-smtp-{name}-{}", process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Rc::new(Spool(path))
    }

    /// Takes all messages out, without what stands before them. Nothing unfinished may be left.
    fn take(&self) -> Vec<String> {
        let mut messages: Vec<String> = fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| {
                let path = entry.unwrap().path();
                assert_eq!(path.extension().unwrap(), "eml", "left behind: {path:?}");
                let text = fs::read_to_string(&path).unwrap();
                fs::remove_file(path).unwrap();
                text
            })
            .collect();
        messages.sort();
        messages
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn serve(sim: &Sim, spool: &Spool, bytes_max: u64) -> SocketAddr {
    let (dir, size) = (spool.0.to_str().unwrap(), bytes_max.to_string());
    let mut receiver =
        Receiver::parse_from(["smtp", "--listen", "10.0.0.1:25", "--spool", dir, "--size", &size]);
    receiver.shards = Some(1 + sim.seed() as usize % 2);
    sim.serve(receiver.server(), move |_shard| with_heads(receiver.clone()))
}

async fn hears(me: &mut ClientStream, codes: &[&str]) -> io::Result<()> {
    for code in codes {
        let line = me.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        assert!(line.starts_with(code), "{line:?} where {code} is right");
    }
    Ok(())
}

#[test]
fn messages_are_kept_whatever_the_network_does() {
    let spool = Spool::new("kept");
    Sim::seeds(60).faults(Faults::all()).run(|sim| {
        let addr = serve(sim, &spool, 1 << 20);
        for n in 0..3 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                hears(&mut me, &["220"]).await?;
                let body: String = (0..net.random() % 3000)
                    .map(|_| [".", "x", "\r\n", "."][net.random() as usize % 4])
                    .collect();
                let body = body + "\r\n";
                let stuffed = format!("\r\n{body}").replace("\r\n.", "\r\n..")[2..].to_owned();
                let commands = format!("EHLO c{n}\r\nMAIL FROM:<a@x> SIZE=9\r\nRCPT TO:<b@y>\r\nDATA\r\n");
                // Pipelined, with the message behind DATA and a command behind the message.
                me.send(format!("{commands}{stuffed}.\r\nQUIT\r\n")).await?;
                hears(
                    &mut me,
                    &["250-", "250-SIZE", "250-", "250 ", "250 ", "250 ", "354", "250 kept", "221"],
                )
                .await?;
                me.closed().await?;
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        for message in spool.take() {
            let body = message.strip_prefix("X-Sender: a@x\r\nX-Recipients: b@y\r\n").expect("the envelope");
            assert!(body.ends_with("\r\n") && body.len() < 10_000);
        }
    });
}

#[test]
fn what_is_wrong_has_its_code_and_what_follows_is_read() {
    let spool = Spool::new("codes");
    Sim::seeds(10).run(|sim| {
        let addr = serve(sim, &spool, 1000);
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            let big = "y".repeat(1500);
            let dialogue = [
                ("", "220"),
                ("MAIL FROM:<a@x>", "503"),
                ("HELO", "501"),
                ("helo me", "250"),
                ("RCPT TO:<b@y>", "503"),
                ("MAIL a@x", "501"),
                ("MAIL FROM:<a@x> BODY=8BITMIME size=1001", "552"),
                ("mail from:<>", "250"),
                ("MAIL FROM:<a@x>", "503"),
                ("DATA", "503"),
                ("RCPT TO:<>", "501"),
                ("RCPT TO: <b@y>", "250"),
                ("RSET", "250"),
                ("RCPT TO:<b@y>", "503"),
                ("MAIL FROM:<a@x>", "250"),
                ("RCPT TO:<b@y>", "250"),
                ("DATA", "354"),
                (&format!("{big}\r\nRSET\r\n."), "552"),
                ("RCPT TO:<b@y>", "503"),
                ("HELLO", "500"),
                ("NOOP x", "250"),
                ("QUIT", "221"),
            ];
            for (line, code) in dialogue {
                if !line.is_empty() {
                    me.send(format!("{line}\r\n")).await?;
                }
                hears(&mut me, &[code]).await?;
            }
            me.closed().await?;
            // A line without an end.
            let mut me = net.connect(addr).await?;
            me.send([b'x'; 1100]).await?;
            hears(&mut me, &["220", "500"]).await?;
            me.closed().await?;
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert!(spool.take().is_empty());
    });
}

#[test]
fn half_a_message_leaves_no_file() {
    let spool = Spool::new("half");
    Sim::seeds(30).run(|sim| {
        let addr = serve(sim, &spool, 1 << 30);
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("HELO a\r\nMAIL FROM:<a@x>\r\nRCPT TO:<b@y>\r\nDATA\r\n").await?;
            hears(&mut me, &["220", "250", "250", "250", "354"]).await?;
            me.send(vec![b'z'; net.random() as usize % 200_000]).await?;
            match net.random() % 3 {
                0 => me.finish()?,
                1 => {
                    me.reset();
                    return Ok(());
                }
                // The rate at which it has to send ends it.
                _ => {}
            }
            me.closed().await?;
            Ok(())
        });
        sim.run_until_done();
        // What is being written then is written to its end: a call that blocks takes a second at most.
        sim.run_for(Duration::from_secs(5));
        sim.finish();
        assert!(spool.take().is_empty());
    });
}

#[test]
fn answer_of_several_lines_is_written_as_it_is() {
    assert_eq!(encode_to_vec(&SMTP, b"250-a\r\n250 b").unwrap(), b"250-a\r\n250 b\r\n");
}
