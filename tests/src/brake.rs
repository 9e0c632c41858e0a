//! Holds a shard still, so that everything that arrives meanwhile is there when it continues.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::SOON;

/// The service's end.
pub struct Brake {
    stands: Sender<()>,
    go: Mutex<Receiver<()>>,
}

/// The test's end.
pub struct Lever {
    stands: Receiver<()>,
    go: Sender<()>,
}

/// Creates a pair for one shard at a time.
pub fn brake() -> (Brake, Lever) {
    let ((tell_stands, stands), (tell_go, go)) = (channel(), channel());
    (Brake { stands: tell_stands, go: Mutex::new(go) }, Lever { stands, go: tell_go })
}

impl Brake {
    /// Blocks this shard until the test releases it. Called in user code. It also continues if the
    /// test failed, or after a long time.
    pub fn hold(&self) {
        let _ = self.stands.send(());
        let _ = self.go.lock().unwrap().recv_timeout(SOON);
    }
}

impl Lever {
    /// Waits until the shard stands still.
    #[track_caller]
    pub fn wait_for_hold(&self) {
        self.stands.recv_timeout(SOON).expect("the shard comes to its brake");
    }

    #[track_caller]
    pub fn let_go(&self) {
        self.go.send(()).expect("the shard stands at its brake");
    }
}
