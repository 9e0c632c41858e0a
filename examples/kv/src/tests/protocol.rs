//! Requests in both forms, wrong ones, and both versions of the protocol.

use ringserve::testing::Faults;

use super::*;

#[test]
fn requests_are_read_in_both_forms_and_wrong_ones_refused() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            let wrong = |name: &str| format!("-ERR wrong number of arguments for '{name}' command");
            // Blank lines and empty arrays are no requests.
            me.0.send("\r\n \r\n*0\r\n\n").await?;
            me.check(&[
                ("PING", "+PONG"),
                ("set k \"a\\x41\\n \\\"b\"", "+OK"),
                ("get k", "\"aA\n \"b\""),
                ("set 'k' 'it\\'s'", "+OK"),
                ("get 'k'", "\"it's\""),
                ("set k ''", "+OK"),
                ("get k", "\"\""),
                ("set k 9223372036854775807", "+OK"),
                ("incr k", "-ERR increment or decrement would overflow"),
                ("get", &wrong("get")),
                ("get a b", &wrong("get")),
                ("set k", &wrong("set")),
                ("mset a 1 b", &wrong("mset")),
                ("echo", &wrong("echo")),
                ("ping a b", &wrong("ping")),
                ("set k v px", "-ERR syntax error"),
                ("set k v nx xx", "-ERR syntax error"),
                ("set k v ex 1 keepttl", "-ERR syntax error"),
                ("set k v bogus", "-ERR syntax error"),
                ("expire k 10 nx xx", "-ERR NX and XX, GT or LT options at the same time are not compatible"),
                ("expire k 10 gt lt", "-ERR GT and LT options at the same time are not compatible"),
                ("expire k 10 bogus", "-ERR Unsupported option bogus"),
                ("expire k 9223372036854775807", "-ERR invalid expire time in 'expire' command"),
                ("scan x", "-ERR invalid cursor"),
                ("scan 0 count 0", "-ERR syntax error"),
                ("flushall bogus", "-ERR syntax error"),
                ("bogus a b", "-ERR unknown command 'bogus', with args beginning with: 'a' 'b' "),
                ("select 0", "+OK"),
                ("select 1", "-ERR DB index is out of range"),
                ("config get databases", "[\"databases\" \"1\"]"),
                ("command count", ":54"),
                ("get k", "\"9223372036854775807\""),
                ("mget k none k", "[\"9223372036854775807\" nil \"9223372036854775807\"]"),
            ])
            .await?;
            // Bytes of any kind, as key and as value.
            let key: Vec<u8> = (0..=255).collect();
            me.0.send(request(&[b"set".as_slice(), &key, &key])).await?;
            me.0.send(request(&[b"get".as_slice(), &key])).await?;
            me.0.send(request(&[b"strlen".as_slice(), &key])).await?;
            assert_eq!(me.reply().await?, "+OK");
            assert_eq!(me.0.exactly(6).await?, b"$256\r\n");
            assert_eq!(me.0.exactly(258).await?, [&key[..], b"\r\n"].concat());
            assert_eq!(me.reply().await?, ":256");
            me.0.send("quit\r\nset k other\r\n").await?;
            assert_eq!(me.reply().await?, "+OK");
            if let Ok(rest) = me.0.closed().await {
                assert_eq!(rest, b"", "no request behind QUIT is answered");
            }
            let mut me = Redis::connect(&net, addr).await?;
            me.check(&[("get k", "\"9223372036854775807\"")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn broken_requests_are_told_and_end_the_connection() {
    const CASES: [(&str, &str); 7] = [
        ("*x\r\n", "-ERR Protocol error: invalid multibulk length"),
        ("*1\r\n:1\r\n", "-ERR Protocol error: expected '$', got ':'"),
        ("*1\r\n$-1\r\n", "-ERR Protocol error: invalid bulk length"),
        ("*1\r\n$99999\r\n", "-ERR Protocol error: invalid bulk length"),
        ("*2000000\r\n", "-ERR Protocol error: invalid multibulk length"),
        ("get \"k\r\n", "-ERR Protocol error: unbalanced quotes in request"),
        ("get 'k'x\r\n", "-ERR Protocol error: unbalanced quotes in request"),
    ];
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--request-bytes-max", "10000"]).addr();
        for (n, (request, error)) in CASES.into_iter().enumerate() {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = Redis::connect(&net, addr).await?;
                me.0.send(format!("set k{n} v\r\nget k{n}\r\n{request}")).await?;
                // What came before is answered.
                assert_eq!(me.reply().await?, "+OK");
                assert_eq!(me.reply().await?, "\"v\"");
                assert_eq!(me.reply().await?, error, "{request:?}");
                if let Ok(rest) = me.0.closed().await {
                    assert_eq!(rest, b"");
                }
                Ok(())
            });
        }
        // A browser that was made to talk to this port.
        sim.client("post", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            me.0.send("POST / HTTP/1.1\r\nset stolen yes\r\n").await?;
            if let Ok(rest) = me.0.closed().await {
                assert_eq!(rest, b"");
            }
            let mut me = Redis::connect(&net, addr).await?;
            me.check(&[("get stolen", "nil")]).await?;
            Ok(())
        });
        // A value grows to what a request could bring, and no further.
        sim.client("large", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            let (half, error) =
                ("v".repeat(5000), "-ERR string exceeds maximum allowed size (proto-max-bulk-len)");
            for expected in [":5000", ":10000", error] {
                me.0.send(request(&["append", "large", &half])).await?;
                assert_eq!(me.reply().await?, expected);
            }
            me.check(&[("strlen large", ":10000")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn third_version_of_the_protocol_is_spoken_once_asked_for() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            me.0.send("get none\r\nhello 3 setname ann\r\nget none\r\nmget none none2 none3 none4\r\n")
                .await?;
            assert_eq!(me.0.exactly(5).await?, b"$-1\r\n");
            let hello = me.reply().await?;
            assert!(hello.contains("\"proto\" :3"), "{hello}");
            assert_eq!(me.0.exactly(3).await?, b"_\r\n");
            assert_eq!(me.0.exactly(16).await?, b"*4\r\n_\r\n_\r\n_\r\n_\r\n");
            me.check(&[
                ("client getname", "\"ann\""),
                ("hello 4", "-NOPROTO unsupported protocol version"),
                ("hello x", "-ERR Protocol version is not an integer or out of range"),
                ("hello 2 auth other x", "-ERR Syntax error in HELLO option 'auth'"),
                (
                    "client setname 'a b'",
                    "-ERR Client names cannot contain spaces, newlines or special characters.",
                ),
            ])
            .await?;
            me.0.send("get none\r\n").await?;
            assert_eq!(me.0.exactly(3).await?, b"_\r\n");
            assert!(me.ask("hello 2").await?.contains("\"proto\" :2"));
            me.0.send("get none\r\n").await?;
            assert_eq!(me.0.exactly(5).await?, b"$-1\r\n");
            Ok(())
        });
        sim.run_until_done();
    });
}
