//! Methods that are not there: those of features that are off, and one that new users look for. A
//! call of one does not compile, and the error says what to do instead, by a bound that no type
//! meets.

use std::marker::PhantomData;

use ringserve_core::framing::TypedFraming;

use crate::server::builder::Server;
#[cfg(not(all(feature = "tls", feature = "websocket")))]
use crate::server::endpoint::Endpoint;
#[cfg(not(all(feature = "admin", feature = "tls", feature = "metrics")))]
use crate::server::running::ServerHandle;
#[cfg(not(all(feature = "tls", feature = "websocket")))]
use crate::shard::face::cx::Cx;
#[cfg(not(all(feature = "tls", feature = "websocket")))]
use crate::shard::face::opening::OpenCx;
#[cfg(not(all(feature = "tls", feature = "metrics")))]
use crate::shard::remote::control::ServerControl;
#[cfg(not(all(feature = "tls", feature = "websocket")))]
use crate::stream::byte_stream::Stream;

/// The type that the bounds are on. The lifetime keeps them from being judged where they are
/// written.
pub struct Call<'a>(PhantomData<&'a ()>);

/// A trait that no type has, with the text of its bound, and the methods that have the bound.
macro_rules! off {
    (
        $trait:ident, $message:literal, $label:literal;
        $(impl [$($parameters:tt)*] $type:ty { $($method:ident($($arguments:tt)*);)* })*
    ) => {
        #[diagnostic::on_unimplemented(message = $message, label = $label)]
        pub trait $trait {}

        $(
            impl<$($parameters)*> $type {
                $(
                    #[doc(hidden)]
                    pub fn $method<'a>($($arguments)*) -> Self
                    where
                        Call<'a>: $trait,
                    {
                        unreachable!("no call of it compiles")
                    }
                )*
            }
        )*
    };
}

off! {
    SeveralServices,
    "a server of `Server::bind` has one service, which its last method takes: `Server::bind(..).serve(|_shard| service)`, or \
     `start`, or `run_until`",
    "call `serve`, `start` or `run_until`; for several services begin with `Server::new()` instead of `Server::bind`";
    impl [F: TypedFraming + Clone + Send] Server<F> { service(self, _: impl Sized); }
}

#[cfg(not(feature = "admin"))]
off! {
    FeatureAdmin,
    "this method needs the feature `admin` of ringserve",
    "`cargo add ringserve --features admin`";
    impl [F] Server<F> { admin(self, _: impl Sized); }
    impl [] ServerHandle { admin_address(&self); probes_address(&self); }
}

#[cfg(not(feature = "metrics"))]
off! {
    FeatureMetrics,
    "this method needs the feature `metrics` of ringserve",
    "`cargo add ringserve --features metrics`";
    impl [] ServerControl { metrics(&self); collector(&self); }
    impl [] ServerHandle { metrics(&self); collector(&self); }
}

#[cfg(not(feature = "tls"))]
off! {
    FeatureTls,
    "this method needs a feature of ringserve: `tls-ring`, `tls-graviola` or `tls-aws-lc-rs`",
    "`cargo add ringserve --features tls-ring`";
    impl [F: TypedFraming + Clone + Send] Server<F> { tls(self, _: impl Sized); }
    impl [] Endpoint { tls(self, _: impl Sized); }
    impl [] ServerControl { tls(&self); }
    impl [] ServerHandle { tls(&self); }
    impl [S: 'static] Cx<'_, S> { tls(&self); }
    impl [] OpenCx<'_> { tls(&self); }
    impl [] Stream { tls(&self); }
}

#[cfg(not(feature = "websocket"))]
off! {
    FeatureWebSocket,
    "this method needs the feature `websocket` of ringserve",
    "`cargo add ringserve --features websocket`";
    impl [F: TypedFraming + Clone + Send] Server<F> { websocket(self); websocket_with(self, _: impl Sized); }
    impl [] Endpoint { websocket(self); websocket_with(self, _: impl Sized); }
    impl [S: 'static] Cx<'_, S> { websocket(&self); }
    impl [] OpenCx<'_> { websocket(&self); send(&self, _: impl Sized); }
    impl [] Stream { websocket(&self); }
}
