//! Listeners whose connections have something between socket and framing.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

#[cfg(feature = "websocket")]
use ringserve_core::Stack;
use ringserve_core::Transport;

/// Makes the transport of a listener on each shard.
#[derive(Clone)]
pub(crate) struct MakeTransport(Arc<dyn Fn() -> Rc<dyn Transport> + Send + Sync>);

impl MakeTransport {
    pub(crate) fn new<T: Transport>(make: impl Fn() -> T + Send + Sync + 'static) -> MakeTransport {
        MakeTransport(Arc::new(move || Rc::new(make())))
    }

    /// The same above another one, if there is one.
    #[cfg(feature = "websocket")]
    pub(crate) fn above(self, lower: Option<MakeTransport>) -> MakeTransport {
        let Some(lower) = lower else { return self };
        MakeTransport::new(move || Stack::new((lower.0)(), (self.0)()))
    }
}

impl fmt::Debug for MakeTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MakeTransport")
    }
}

/// The listeners of a server that have one, by number; empty if none has.
#[derive(Clone, Default)]
pub(crate) struct Transports(Arc<[Option<MakeTransport>]>);

impl Transports {
    /// The listeners in their order, each with the closure that makes its transport, if it has one.
    pub(crate) fn of<'a>(listeners: impl Iterator<Item = Option<&'a MakeTransport>>) -> Transports {
        let all: Arc<[_]> = listeners.map(Option::<&MakeTransport>::cloned).collect();
        if all.iter().any(Option::is_some) { Transports(all) } else { Transports::default() }
    }

    /// Makes each, on its shard's thread. It is user code, which may panic.
    pub(crate) fn made(&self) -> impl Iterator<Item = (u16, Rc<dyn Transport>)> {
        let made =
            |(listener, make): (usize, &Option<MakeTransport>)| Some((listener as u16, (make.as_ref()?.0)()));
        self.0.iter().enumerate().filter_map(made)
    }
}
