#![cfg_attr(not(doctest), doc = include_str!("links.md"))]
#![doc = include_str!("../../docs/guide/README.md")]

/// A page. It names other pages by their files, as they lie in the repository; of two definitions
/// of a link the first one counts, so here they lead to modules.
macro_rules! page {
    ($name:ident, $file:literal, $is_shown:meta) => {
        #[cfg_attr(not(doctest), doc = include_str!("links.md"))]
        #[cfg_attr($is_shown, doc = include_str!(concat!("../../docs/guide/", $file)))]
        pub mod $name {}
    };
}

page!(bad_input, "bad_input.md", all());
// The programs of these need more crates than this one, so the package `tests` compiles them.
page!(balancing, "balancing.md", not(doctest));
page!(names, "names.md", not(doctest));
page!(choosing, "choosing.md", not(doctest));
page!(coming_from, "coming_from.md", not(doctest));
page!(databases, "databases.md", not(doctest));
page!(deployment, "deployment.md", not(doctest));
// Its program is compiled by the crate that it is about.
page!(gateway, "gateway.md", not(doctest));
page!(inspecting, "inspecting.md", not(doctest));
// The programs of these are compiled by the crates that they are about.
page!(nats, "nats.md", not(doctest));
page!(nodes, "nodes.md", not(doctest));
page!(operating, "operating.md", not(doctest));
page!(replies, "replies.md", not(doctest));
page!(replacing, "replacing.md", not(doctest));
page!(services, "services.md", not(doctest));
page!(upstreams, "upstreams.md", not(doctest));
page!(behind_a_proxy, "behind_a_proxy.md", all());
page!(topics, "topics.md", all());
page!(epoll, "epoll.md", all());
page!(first_hour, "first_hour.md", all());
page!(framing, "framing.md", all());
page!(glossary, "glossary.md", all());
page!(machine, "machine.md", all());
page!(middleware, "middleware.md", all());
page!(production, "production.md", all());
page!(protocols, "protocols.md", all());
page!(state, "state.md", all());
page!(stopping, "stopping.md", all());
page!(testing, "testing.md", any(not(doctest), feature = "testing"));
page!(tls, "tls.md", any(not(doctest), feature = "tls"));
page!(
    websocket,
    "websocket.md",
    any(not(doctest), all(feature = "http", feature = "tls", feature = "websocket"))
);
page!(under_attack, "under_attack.md", all());
page!(waiting, "waiting.md", all());
