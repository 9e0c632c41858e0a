use std::env;
use std::process;
use std::rc::Rc;

use ringserve::framing::encode_to_vec;
use ringserve::testing::{ClientStream, Faults, Sim, SimServer};

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

fn starts(sim: &Sim, spool: &Spool, bytes_max: u64) -> SimServer {
    let (dir, size) = (spool.0.to_str().unwrap(), bytes_max.to_string());
    let args = ["smtp", "--listen", "10.0.0.1:25", "--spool", dir, "--size", &size, "--name", "mx.example"];
    let mut receiver = Receiver::parse_from(args);
    receiver.shards = Some(1 + sim.seed() as usize % 2);
    sim.start(receiver.server(), move |_shard| with_heads(receiver.clone())).unwrap()
}

fn serve(sim: &Sim, spool: &Spool, bytes_max: u64) -> SocketAddr {
    starts(sim, spool, bytes_max).addr()
}

async fn hears(me: &mut ClientStream, codes: &[&str]) -> io::Result<()> {
    for code in codes {
        let line = me.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        assert!(line.starts_with(code), "{line:?} where {code} is right");
    }
    Ok(())
}

/// Sends each line, if there is one, and reads the code of its reply.
async fn says(me: &mut ClientStream, dialogue: &[(&str, &str)]) -> io::Result<()> {
    for (line, code) in dialogue {
        if !line.is_empty() {
            me.send(format!("{line}\r\n")).await?;
        }
        let answer = me.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        assert!(answer.starts_with(code), "{answer:?} to {line:?} where {code} is right");
    }
    Ok(())
}

/// The dialogue of a client until it may send a message.
const BEGIN: [(&str, &str); 5] =
    [("", "220"), ("HELO a", "250"), ("MAIL FROM:<a@x>", "250"), ("RCPT TO:<b@y>", "250"), ("DATA", "354")];

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
            let rest =
                message.strip_prefix("Return-Path: <a@x>\r\nX-Recipients: b@y\r\n").expect("the envelope");
            let (from, rest) =
                rest.split_once(")\r\n\tby mx.example with ESMTP id ").expect("who, and by what");
            assert!(from.starts_with("Received: from c") && from.contains(" ([10."), "{from}");
            let (id_and_date, body) = rest.split_once(" +0000\r\n").expect("a date");
            assert!(id_and_date[16..].starts_with("; "), "{id_and_date}");
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
            says(&mut me, &dialogue).await?;
            me.closed().await?;
            // A line without an end.
            let mut me = net.connect(addr).await?;
            me.send([b'x'; 1100]).await?;
            hears(&mut me, &["220", "500", "421 mx.example"]).await?;
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
        // What is being written then is written to its end: a call that blocks takes a second at
        // most.
        sim.run_for(Duration::from_secs(5));
        sim.finish();
        assert!(spool.take().is_empty());
    });
}

#[test]
fn each_command_has_its_place_and_its_arguments() {
    let spool = Spool::new("commands");
    Sim::seeds(4).run(|sim| {
        let addr = serve(sim, &spool, 1000);
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            let dialogue = [
                ("", "220 mx.example "),
                // Before a greeting too.
                ("NOOP", "250"),
                ("HELP", "214"),
                ("help mail", "214"),
                ("VRFY ann", "252"),
                ("VRFY", "501"),
                ("EXPN list", "502"),
                ("RSET", "250"),
                ("RSET now", "501"),
                ("TURN", "502"),
                ("MAIL FROM:<ä@x>", "500"),
                ("HELO a\rb", "500"),
                ("EHLO a b", "501"),
                ("helo [192.0.2.1]  ", "250 mx.example"),
                ("MAIL FROM:<a@x>", "250"),
                ("RCPT TO:<b@y>", "250"),
                // Refused, so that nothing changes.
                ("EHLO", "501"),
                ("DATA now", "501"),
                ("QUIT now", "501"),
                ("VRFY ann", "252"),
                ("RCPT TO:<Postmaster>", "250"),
                (r#"RCPT TO:<"a>b"@y>"#, "250"),
                ("DATA", "354"),
                ("EHLO a\r\n.", "250 kept"),
                // What was said of that message is over.
                ("RCPT TO:<b@y>", "503"),
                ("MAIL FROM:<a@x>", "250"),
                ("HELO b", "250"),
                ("RCPT TO:<b@y>", "503"),
                ("QUIT", "221 mx.example"),
            ];
            says(&mut me, &dialogue).await?;
            me.closed().await?;
            Ok(())
        });
        sim.run_until_done();
        let [kept] = <[String; 1]>::try_from(spool.take()).unwrap();
        assert!(kept.contains(r#"X-Recipients: b@y, Postmaster, "a>b"@y"#), "{kept}");
        assert!(kept.contains("Received: from [192.0.2.1] ([10."), "{kept}");
    });
}

#[test]
fn parameters_are_known_once_and_sound() {
    let spool = Spool::new("parameters");
    Sim::seeds(4).run(|sim| {
        let addr = serve(sim, &spool, 1000);
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            hears(&mut me, &["220"]).await?;
            me.send("EHLO a\r\n").await?;
            hears(&mut me, &["250-mx.example", "250-SIZE 1000", "250-8BITMIME", "250 PIPELINING"]).await?;
            for (params, code) in [
                ("SIZE=1000", "250"),
                ("SIZE=0", "250"),
                ("body=8bitmime SIZE=00000000000000001000", "250"),
                ("BODY=7BIT", "250"),
                ("SIZE=1001", "552"),
                // Twenty digits, more than 64 bits.
                ("SIZE=99999999999999999999", "552"),
                ("SIZE=000000000000000001000", "501"),
                ("SIZE=", "501"),
                ("SIZE", "501"),
                ("SIZE=x", "501"),
                ("SIZE=+1", "501"),
                ("SIZE=-1", "501"),
                ("SIZE=1 SIZE=1", "501"),
                ("BODY=BINARYMIME", "501"),
                ("BODY", "501"),
                ("SMTPUTF8", "555"),
                ("X-OTHER=1", "555"),
                ("=1", "501"),
            ] {
                says(&mut me, &[(&format!("MAIL FROM:<a@x> {params}"), code)]).await?;
                let next = if code == "250" { "250" } else { "503" };
                says(&mut me, &[("RCPT TO:<b@y>", next), ("RSET", "250")]).await?;
            }
            let rest = [
                ("MAIL FROM:<Postmaster>", "501"),
                ("MAIL FROM:<>SIZE=1", "501"),
                ("MAIL FROM:<a@x>", "250"),
                ("RCPT TO:<b@y> NOTIFY=NEVER", "555"),
                ("RCPT TO:<b@y> ", "250"),
            ];
            says(&mut me, &rest).await?;
            for _ in 0..99 {
                says(&mut me, &[("RCPT TO:<b@y>", "250")]).await?;
            }
            says(&mut me, &[("RCPT TO:<b@y>", "452"), ("QUIT", "221")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
    // No limit.
    Sim::seeds(4).run(|sim| {
        let addr = serve(sim, &spool, 0);
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            says(&mut me, &[("", "220"), ("HELO a", "250"), ("MAIL FROM:<a@x> SIZE=4000000000", "250")])
                .await?;
            says(&mut me, &[("RCPT TO:<b@y>", "250"), ("DATA", "354"), ("hi\r\n.", "250"), ("QUIT", "221")])
                .await?;
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(spool.take().len(), 1);
    });
}

#[test]
fn what_this_host_lacks_is_no_word_against_the_message() {
    Sim::seeds(10).run(|sim| {
        let spool = Spool::new("lost");
        let addr = serve(sim, &spool, 1 << 20);
        let (dir, is_early) = (spool.0.clone(), sim.random().is_multiple_of(2));
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            says(&mut me, &BEGIN[..4]).await?;
            if is_early {
                fs::remove_dir_all(&dir)?;
                says(&mut me, &[("DATA", "451")]).await?;
            } else {
                says(&mut me, &[("DATA", "354")]).await?;
                fs::remove_dir_all(&dir)?;
                says(&mut me, &[("hi\r\nRSET\r\n.", "451")]).await?;
            }
            // The session goes on, and so does the next message.
            fs::create_dir(&dir)?;
            says(&mut me, &BEGIN[2..]).await?;
            says(&mut me, &[("hi\r\n.", "250 kept"), ("QUIT", "221")]).await?;
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(spool.take().len(), 1);
    });
}

#[test]
fn silent_peer_is_told_421_after_five_minutes() {
    let spool = Spool::new("silent");
    Sim::seeds(20).run(|sim| {
        let addr = serve(sim, &spool, 1 << 20);
        sim.client("a", async move |net| {
            let mut me = net.connect(addr).await?;
            says(&mut me, &BEGIN[..1 + net.random() as usize % 4]).await?;
            net.sleep(Duration::from_secs(290)).await;
            says(&mut me, &[("NOOP", "250")]).await?;
            let began = net.now();
            hears(&mut me, &["421 mx.example"]).await?;
            let waited = (net.now() - began).as_secs();
            assert!((299..303).contains(&waited), "{waited} s");
            assert_eq!(me.closed().await?, b"");
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert!(spool.take().is_empty());
    });
}

#[test]
fn message_begun_before_a_drain_is_kept() {
    let spool = Spool::new("drain");
    Sim::seeds(60).run(|sim| {
        let server = starts(sim, &spool, 1 << 20);
        let addr = server.addr();
        let (ready, told) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        for n in 0..4 {
            let (ready, told) = (ready.clone(), told.clone());
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                says(&mut me, &BEGIN[..n + 2]).await?;
                ready.set(ready.get() + 1);
                if n < 3 {
                    hears(&mut me, &["421 mx.example"]).await?;
                } else {
                    for _ in 0..20 {
                        me.send(format!("{}\r\n", "z".repeat(net.random() as usize % 3000))).await?;
                        net.sleep(Duration::from_millis(500)).await;
                    }
                    assert!(told.get(), "the drain came before the end");
                    me.send(".\r\nNOOP\r\n").await?;
                    hears(&mut me, &["250 kept", "421 mx.example"]).await?;
                }
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        assert!(sim.run_until(Duration::from_secs(3), || ready.get() == 4));
        told.set(true);
        server.drain();
        sim.run_until_done();
        assert_eq!(spool.take().len(), 1);
    });
}

#[test]
fn dates_are_as_in_mail() {
    for (seconds, text) in [
        (0, "Thu, 1 Jan 1970 00:00:00 +0000"),
        (951_782_399, "Mon, 28 Feb 2000 23:59:59 +0000"),
        (951_782_400, "Tue, 29 Feb 2000 00:00:00 +0000"),
        (1_709_251_199, "Thu, 29 Feb 2024 23:59:59 +0000"),
        (1_735_689_599, "Tue, 31 Dec 2024 23:59:59 +0000"),
        (4_107_542_400, "Mon, 1 Mar 2100 00:00:00 +0000"),
    ] {
        assert_eq!(date(seconds), text);
    }
}

#[test]
fn answer_of_several_lines_is_written_as_it_is() {
    assert_eq!(encode_to_vec(&SMTP, b"250-a\r\n250 b").unwrap(), b"250-a\r\n250 b\r\n");
}
