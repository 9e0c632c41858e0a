//! Whole servers with a simulated NATS between them.

use ringserve::testing::{ClientStream, Faults, Net, Sim};

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const FRONTS: [&str; 2] = ["10.0.0.1:7000", "10.0.0.2:7000"];
const BROKER: &str = "10.0.0.9:4222";

/// The connections of a NATS, which passes on what one of them says.
type Clients = Rc<RefCell<Vec<Rc<RefCell<Vec<String>>>>>>;

/// One that knows the room and nothing else.
fn broker(sim: &Sim) {
    sim.background("nats", async |net| {
        let (clients, mut listener) = (Clients::default(), net.listen(BROKER)?);
        loop {
            let stream = listener.accept().await;
            let out = Rc::<RefCell<Vec<String>>>::default();
            clients.borrow_mut().push(out.clone());
            net.spawn(serve(net.clone(), stream, clients.clone(), out));
        }
    });
}

async fn serve(net: Net, mut stream: ClientStream, clients: Clients, out: Rc<RefCell<Vec<String>>>) {
    let mut room = String::new();
    if stream.send("INFO {\"headers\":true}\r\n").await.is_err() {
        return;
    }
    loop {
        for text in out.take() {
            let message = format!("MSG chat.room {room} {}\r\n{text}\r\n", text.len());
            if stream.send(message).await.is_err() {
                return;
            }
        }
        let Ok(line) = net.timeout(Duration::from_millis(5), stream.line()).await else { continue };
        let Ok(Some(line)) = line else { return };
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["PING"] => "PONG\r\n".to_owned(),
            ["SUB", "chat.room", sid] => {
                sid.clone_into(&mut room);
                continue;
            }
            ["PUB", "chat.room", _] => {
                let Ok(Some(text)) = stream.line().await else { return };
                clients.borrow().iter().for_each(|client| client.borrow_mut().push(text.clone()));
                continue;
            }
            ["PUB", "nothing", reply, _] => {
                let Ok(Some(_)) = stream.line().await else { return };
                format!("HMSG {reply} 0 16 16\r\nNATS/1.0 503\r\n\r\n\r\n")
            }
            _ => continue,
        };
        if stream.send(answer).await.is_err() {
            return;
        }
    }
}

#[test]
fn lines_reach_the_clients_of_both_servers() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        broker(sim);
        for front in FRONTS {
            let args = Args::parse_from(["nats", "--listen", front, "--nats", BROKER]);
            let server = Server::bind(args.listen).framing(Lines::default()).shards(1);
            sim.serve(server, move |shard| Chat::new(&args, shard));
        }
        sim.run_for(SECOND);
        for (n, front) in FRONTS.into_iter().enumerate() {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(front).await?;
                net.sleep(SECOND).await;
                me.send("?nothing at all\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("* no service listens to this subject"));
                net.sleep(SECOND).await;
                me.send(format!("hello of {n}\n")).await?;
                let mut heard = [me.line().await?.unwrap(), me.line().await?.unwrap()];
                heard.sort();
                assert_eq!(heard, ["hello of 0", "hello of 1"]);
                Ok(())
            });
        }
        sim.run_until_done();
    });
}
