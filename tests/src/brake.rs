//! Holds a shard still, so that what comes meanwhile is all there when it goes on.

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

/// For one shard at a time.
pub fn brake() -> (Brake, Lever) {
    let ((tell_stands, stands), (tell_go, go)) = (channel(), channel());
    (Brake { stands: tell_stands, go: Mutex::new(go) }, Lever { stands, go: tell_go })
}

impl Brake {
    /// To be called in user code: nothing happens on this shard until the test lets go. It also does if the test
    /// failed, or after a long time.
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
