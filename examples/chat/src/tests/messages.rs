//! Members that speak WebSocket, among those that send lines.

use super::*;

/// A member whose lines are messages of up to 125 bytes.
struct Browser(ClientStream);

impl Browser {
    async fn enters(net: &Net, addr: SocketAddr) -> io::Result<Browser> {
        let mut me = net.connect(addr).await?;
        me.send(
            "GET / HTTP/1.1\r\nhost: chat\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        )
        .await?;
        assert_eq!(next(&mut me).await?, "HTTP/1.1 101 Switching Protocols");
        while !next(&mut me).await?.is_empty() {}
        let mut me = Browser(me);
        let greeting = me.hears().await?;
        assert!(greeting.starts_with("* you are guest-"), "{greeting}");
        Ok(me)
    }

    async fn says(&mut self, text: &str) -> io::Result<()> {
        // Masked with zeros, which changes nothing.
        let head = [0x81, 0x80 | text.len() as u8, 0, 0, 0, 0];
        self.0.send([&head, text.as_bytes()].concat()).await
    }

    async fn hears(&mut self) -> io::Result<String> {
        let head = self.0.exactly(2).await?;
        assert!(head[0] == 0x81 && head[1] < 126, "a short message of text: {head:?}");
        let text = self.0.exactly(head[1].into()).await?;
        Ok(String::from_utf8(text).expect("it is text"))
    }
}

#[test]
fn lines_and_messages_meet_in_one_room() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim);
        let (lines, messages) = (server.addr_of("chat"), server.addr_of("chat by websocket"));
        let is_here = Rc::new(Cell::new(false));
        let here = is_here.clone();
        sim.client("bob", async move |net| {
            let mut me = Browser::enters(&net, messages).await?;
            me.says("/name bob").await?;
            while me.hears().await? != "* you are called bob now" {}
            here.set(true);
            while me.hears().await? != "ann: hello" {}
            me.says("hello ann").await?;
            me.says("/quit").await?;
            while me.hears().await? != "* goodbye" {}
            Ok(())
        });
        sim.client("ann", async move |net| {
            let mut me = enters(&net, lines, "ann").await?;
            while !is_here.get() {
                net.sleep(SECOND).await;
            }
            me.send("hello\n").await?;
            awaits(&mut me, "bob: hello ann").await?;
            awaits(&mut me, "* bob left").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}
