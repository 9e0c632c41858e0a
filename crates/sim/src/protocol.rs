//! The rules of the driver boundary, checked on both sides of it: the submissions of the core, and
//! the answers of the driver.

use ringserve_core::{AcceptEnd, Completion, ConnId, Op, Socket};

/// Operations in flight on a connection.
#[derive(Debug, Default)]
struct Flight {
    generation: u64,
    adopted: bool,
    connect: bool,
    connect_stop: bool,
    connect_ended: u64,
    receive: bool,
    receive_stop: bool,
    send: bool,
    send_stop: bool,
    shutdown: bool,
    close: bool,
    /// The turn in which a receive, a send ended.
    receive_ended: u64,
    send_ended: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Accept {
    armed: bool,
    stop: bool,
    ended: u64,
    listening: Listening,
}

/// The state of a listening socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Listening {
    #[default]
    Open,
    /// A stop was requested.
    Stopping,
    Closed,
}

/// The requests that the core may make of its driver, and the answers that the driver may give, for
/// each connection.
///
/// A stop may cross an end: it is allowed in the turn in which the core receives the end, too.
#[derive(Debug, Default)]
pub struct Protocol {
    /// By slot.
    flights: Vec<Flight>,
    accepts: Vec<Accept>,
    turn: u64,
    /// Sockets that were accepted and are neither adopted nor refused.
    sockets: Vec<u64>,
}

impl Protocol {
    /// Begins another turn.
    pub fn begin_turn(&mut self, turn: u64) {
        self.turn = turn;
    }

    fn flight(&mut self, id: ConnId, what: &str) -> &mut Flight {
        let flight = self.flights.get_mut(id.slot() as usize);
        let flight = flight.filter(|flight| flight.adopted && flight.generation == id.generation());
        flight.unwrap_or_else(|| panic!("{what} for {id}, which is not adopted"))
    }

    /// True if bytes of this connection are still asked for.
    pub fn is_receiving(&self, id: ConnId) -> bool {
        let flight = &self.flights[id.slot() as usize];
        flight.receive && !flight.receive_stop
    }

    fn adopt(&mut self, id: ConnId) {
        let slot = id.slot() as usize;
        while self.flights.len() <= slot {
            self.flights.push(Flight::default());
        }
        assert!(!self.flights[slot].adopted, "slot {slot} is adopted twice");
        self.flights[slot] = Flight { generation: id.generation(), adopted: true, ..Flight::default() };
    }

    fn socket_leaves(&mut self, socket: u64) {
        let place = self.sockets.iter().position(|known| *known == socket);
        self.sockets.swap_remove(place.expect("a socket that was not accepted"));
    }

    /// Notes that the core passes a socket to another shard.
    pub fn passed_on(&mut self, socket: Socket) {
        self.socket_leaves(socket.0);
    }

    /// Notes that another shard passes a socket to the core.
    pub fn passed_back(&mut self, socket: Socket) {
        assert!(!self.sockets.contains(&socket.0), "socket {socket:?} twice");
        self.sockets.push(socket.0);
    }

    /// True if a stop of a listener was requested and it is not closed yet.
    pub fn is_stopping(&self) -> bool {
        self.accepts.iter().any(|accept| accept.listening == Listening::Stopping)
    }

    /// True if an accepted socket waits in the core.
    pub fn has_waiting(&self) -> bool {
        !self.sockets.is_empty()
    }

    /// Checks an operation that the core submits.
    pub fn submitted(&mut self, op: &Op) {
        let turn = self.turn;
        match op {
            Op::Accept { listener } => {
                let index = usize::from(*listener);
                self.accepts.resize(self.accepts.len().max(index + 1), Accept::default());
                assert!(!self.accepts[index].armed, "two accepts on listener {listener}");
                assert_eq!(self.accepts[index].listening, Listening::Open, "accept on listener {listener}");
                self.accepts[index] = Accept { armed: true, ..Accept::default() };
            }
            Op::AcceptStop { listener } => {
                let accept = &mut self.accepts[usize::from(*listener)];
                let met = accept.ended == self.turn;
                assert!(met || (accept.armed && !accept.stop), "stop of an accept: {accept:?}");
                accept.stop = accept.armed;
            }
            Op::StopListening { listener } => {
                let index = usize::from(*listener);
                self.accepts.resize(self.accepts.len().max(index + 1), Accept::default());
                let accept = &mut self.accepts[index];
                assert_eq!(accept.listening, Listening::Open, "listener {listener} is closed twice");
                accept.listening = Listening::Stopping;
            }
            Op::Adopt { id, socket } => {
                self.socket_leaves(socket.0);
                self.adopt(*id);
            }
            Op::Connect { id, .. } => {
                self.adopt(*id);
                self.flight(*id, "connect").connect = true;
            }
            Op::ConnectStop { id } => {
                let flight = self.flight(*id, "stop of a connect");
                let met = flight.connect_ended == turn;
                assert!(
                    met || (flight.connect && !flight.connect_stop),
                    "stop of a connect on {id}: {flight:?}"
                );
                flight.connect_stop = flight.connect;
            }
            Op::Refuse { socket } => self.socket_leaves(socket.0),
            Op::Receive { id } | Op::ReceiveOnce { id, .. } | Op::ReceiveInto { id, .. } => {
                let flight = self.flight(*id, "receive");
                assert!(!flight.receive && !flight.connect && !flight.close, "receive on {id}: {flight:?}");
                flight.receive = true;
            }
            Op::ReceiveStop { id } | Op::ShutdownInput { id } => {
                let flight = self.flight(*id, "stop of a receive");
                let met = flight.receive_ended == turn;
                assert!(
                    met || (flight.receive && !flight.receive_stop),
                    "stop of a receive on {id}: {flight:?}"
                );
                flight.receive_stop = flight.receive;
            }
            Op::Probe { id } => {
                let flight = self.flight(*id, "probe");
                let met = flight.receive_ended == turn;
                let fair = met || (flight.receive && !flight.receive_stop);
                assert!(fair && !flight.close, "probe of {id}: {flight:?}");
            }
            Op::Send { id, batch } => {
                let flight = self.flight(*id, "send");
                assert!(
                    !flight.send && !flight.connect && !flight.close && !batch.is_empty(),
                    "send on {id}: {flight:?}"
                );
                flight.send = true;
            }
            Op::SendStop { id } => {
                let flight = self.flight(*id, "stop of a send");
                let met = flight.send_ended == turn;
                assert!(met || (flight.send && !flight.send_stop), "stop of a send on {id}: {flight:?}");
                flight.send_stop = flight.send;
            }
            Op::Shutdown { id } => {
                let flight = self.flight(*id, "shutdown");
                assert!(!flight.shutdown && !flight.connect && !flight.close, "shutdown of {id}: {flight:?}");
                flight.shutdown = true;
            }
            Op::Close { id, .. } => {
                let flight = self.flight(*id, "close");
                let idle = !flight.receive && !flight.send && !flight.shutdown && !flight.close;
                assert!(idle && !flight.connect, "close of {id}: {flight:?}");
                flight.close = true;
            }
        }
    }

    /// Checks an answer of the driver.
    pub fn completed(&mut self, completion: &Completion) {
        let turn = self.turn;
        match completion {
            Completion::Accepted { listener, socket, .. } => {
                let accept = self.accepts[usize::from(*listener)];
                let wanted = accept.armed || accept.listening == Listening::Stopping;
                assert!(wanted, "a socket that was not asked for: {accept:?}");
                assert!(!self.sockets.contains(&socket.0), "socket {socket:?} twice");
                self.sockets.push(socket.0);
            }
            Completion::AcceptEnded { listener, end } => {
                let accept = &mut self.accepts[usize::from(*listener)];
                let listening = match end {
                    AcceptEnd::Closed => {
                        assert_eq!(accept.listening, Listening::Stopping, "listener {listener} is closed");
                        Listening::Closed
                    }
                    _ => {
                        assert!(accept.armed, "an accept ended twice");
                        accept.listening
                    }
                };
                *accept = Accept { ended: turn, listening, ..Accept::default() };
            }
            Completion::Connected { id, .. } => {
                let flight = self.flight(*id, "end of a connect");
                assert!(flight.connect, "end of a connect on {id}: {flight:?}");
                (flight.connect, flight.connect_stop) = (false, false);
                flight.connect_ended = turn;
            }
            Completion::Received { id, lease } => {
                let flight = self.flight(*id, "bytes");
                assert!(flight.receive && !lease.is_empty(), "bytes on {id}: {flight:?}");
            }
            Completion::ReceiveEnded { id, .. } | Completion::Filled { id, .. } => {
                let flight = self.flight(*id, "end of a receive");
                assert!(flight.receive, "end of a receive on {id}: {flight:?}");
                (flight.receive, flight.receive_stop) = (false, false);
                flight.receive_ended = turn;
            }
            Completion::Sent { id, .. } => {
                let flight = self.flight(*id, "end of a send");
                assert!(flight.send, "end of a send on {id}: {flight:?}");
                (flight.send, flight.send_stop) = (false, false);
                flight.send_ended = turn;
            }
            Completion::ShutDown { id } => {
                let flight = self.flight(*id, "end of a shutdown");
                assert!(flight.shutdown, "end of a shutdown on {id}: {flight:?}");
                flight.shutdown = false;
            }
            Completion::Closed { id } => {
                let flight = self.flight(*id, "end of a close");
                assert!(flight.close, "end of a close on {id}: {flight:?}");
                flight.adopted = false;
            }
        }
    }

    /// Panics unless nothing is left.
    pub fn check_rest(&self) {
        assert!(self.flights.iter().all(|flight| !flight.adopted), "a connection was not closed");
        let ended = |accept: &Accept| !accept.armed && accept.listening != Listening::Stopping;
        assert!(self.accepts.iter().all(ended), "an accept did not end, or a listener is not closed");
        assert!(self.sockets.is_empty(), "a socket was neither adopted nor refused");
    }
}
