//! Files, and the errors of those that are wrong.

use ringserve_gateway::config::GatewayFile;

use super::*;

const SERVICE: &str = "[[service]]\nlisten = [\"127.0.0.1:0\"]\n";
const UPSTREAM: &str = "[upstream.web]\naddresses = [\"127.0.0.1:1\"]\n";

fn error_of(text: &str) -> String {
    let folder = Folder::new();
    let file = folder.file("a.toml", text);
    let error = GatewayFile::read(&file).err().map(|error| error.to_string()).unwrap_or_default();
    error.replace(&format!("{}/", folder.0.display()), "")
}

#[test]
fn example_is_right() {
    let file = GatewayFile::read(example()).expect("the example is right");
    assert_eq!((file.routes(), file.upstreams().count(), file.listeners().count()), (4, 4, 3));
}

#[test]
fn errors_have_line_and_column_and_say_what_is_allowed() {
    for (text, error) in [
        ("", "a.toml:1:1: there is no [[service]], so nothing listens"),
        ("[[service]]\nlisten = 80", "a.toml:2:10: service.listen: 80 is not a text"),
        (
            "[[service]]\nlisten = [\"localhost:80\"]",
            "a.toml:2:11: service.listen: \"localhost:80\" is not an address and a port, such as \"0.0.0.0:80\" or \"[::]:80\"",
        ),
        ("[[service]\n", "a.toml:1:11: unclosed array table, expected `]`"),
        (
            "[[service]]\nlisten = [\"127.0.0.1:0\"]\nredirect = \"http\"",
            "a.toml:3:12: service.redirect: \"http\" is not \"https\"",
        ),
        (
            "[[service]]\nlisten = [\"127.0.0.1:0\"]\nidel_timeout = \"1s\"",
            "a.toml:3:1: service.idel_timeout: there is no such setting; idle_timeout?",
        ),
        (
            "[upstream.web]\naddresses = [\"127.0.0.1\"]",
            "a.toml:2:14: upstream.web.addresses: \"127.0.0.1\" is not a host and a port",
        ),
        (
            "[upstream.web]\naddresses = [\"a:1\"]\nqueue = 5",
            "a.toml:3:9: upstream.web.queue: 5 is not a time such as \"250ms\", \"2s\", \"10m\" or \"1h\"",
        ),
        (
            "[upstream.web]\n",
            "a.toml:1:11: upstream.web: it has one of addresses = [\"10.0.0.11:80\"], names = \"web.internal:80\" and file = \"web.txt\"",
        ),
        (
            "gateway = { forwarded = \"yes\" }",
            "a.toml:1:25: gateway.forwarded: \"yes\" is not \"x-forwarded\" or \"rfc7239\" or \"both\" or \"off\"",
        ),
    ] {
        assert_eq!(error_of(text), error, "{text}");
    }
}

#[test]
fn errors_of_routes_have_line_and_column() {
    for (route, error) in [
        ("upstream = \"wbe\"", "a.toml:6:12: route.upstream: there is no upstream \"wbe\"; web?"),
        ("path = \"/a\"", "a.toml:5:1: route: it has none of upstream, split, respond and redirect"),
        (
            "upstream = \"web\"\nredirect = \"/a\"",
            "a.toml:7:12: route.redirect: a route has one of upstream, split, respond and redirect",
        ),
        (
            "upstream = \"web\"\npath = \"/a/../b\"",
            "a.toml:7:8: route.path: the path \"/a/../b\" matches nothing: requests come as \"/b\"",
        ),
        (
            "upstream = \"web\"\nrequest_fields = { set = { content-length = \"5\" } }",
            "a.toml:7:45: route.request_fields.set.content-length: the field content-length is the gateway's own, and no route changes it",
        ),
        (
            "upstream = \"web\"\nrate = { per_second = 0 }",
            "a.toml:7:23: route.rate.per_second: 0 is not a number from 1 to 1000000",
        ),
        (
            "upstream = \"web\"\nallow = [\"10.0.0.0/33\"]",
            "a.toml:7:10: route.allow: \"10.0.0.0/33\" is not a network such as \"10.0.0.0/8\"",
        ),
        (
            "path = \"/a\"\nupstream = \"web\"\n[[route]]\npath = \"/a\"\nupstream = \"web\"",
            "a.toml:9:8: this route can never be reached: the one in line 6 takes all of its requests",
        ),
    ] {
        assert_eq!(error_of(&format!("{UPSTREAM}{SERVICE}[[route]]\n{route}")), error, "{route}");
    }
}

#[test]
fn settings_that_exclude_each_other_are_refused() {
    for (text, error) in [
        ("mode = \"tcp\"", "needs an upstream"),
        ("upstream = \"web\"", "this is for mode = \"tcp\""),
        ("mode = \"tcp\"\nupstream = \"other\"", "there is no upstream \"other\""),
        ("tls = [{ cert = \"nothing.pem\", key = \"nothing.pem\" }]", "nothing.pem"),
    ] {
        let found = error_of(&format!("{UPSTREAM}{SERVICE}{text}\n"));
        assert!(found.contains(error), "{text}: {found:?}");
    }
}

/// The status and the words of the program for a file, with these variables.
fn checks(path: &Path, variables: &[(&str, &str)]) -> (i32, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ringserve-gateway"));
    command.arg("--check").arg("--config").arg(path).envs(variables.iter().copied());
    let output = command.output().expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().expect("a code"), String::from_utf8(text).expect("text"))
}

const WEB: &str = "[upstream.web]\naddresses = [\"127.0.0.1:1\"]\n[[service]]\nlisten = [\"127.0.0.1:2\"]\n";

#[test]
fn included_files_have_routes_and_upstreams() {
    let folder = Folder::new();
    std::fs::create_dir(folder.0.join("routes.d")).expect("a folder");
    let first = folder.file("gateway.toml", &format!("include = \"routes.d/*.toml\"\n{WEB}"));
    assert!(checks(&first, &[]).1.contains(": 0 routes, 1 upstreams,"));
    folder.file("routes.d/a.toml", "[[route]]\npath = \"/a\"\nupstream = \"web\"\n");
    folder.file(
        "routes.d/b.toml",
        "[upstream.b]\naddresses = [\"127.0.0.1:3\"]\n[[route]]\nupstream = \"b\"\n",
    );
    folder.file("routes.d/c.txt", "no TOML");
    let (code, text) = checks(&first, &[]);
    assert!(code == 0 && text.contains(": 2 routes, 2 upstreams,"), "{text}");
    let wrong = |text: &str, wanted: &str| {
        folder.file("routes.d/z.toml", text);
        let (code, said) = checks(&first, &[]);
        assert!(code == 2 && said.contains(wanted), "{said}");
    };
    wrong(
        "\n[server]\nshards = 2",
        "routes.d/z.toml:2:2: server: an included file has upstream and route alone",
    );
    wrong(
        "[upstream.web]\naddresses = [\"127.0.0.1:4\"]",
        "routes.d/z.toml:1:11: upstream.web: it is in another file too",
    );
    wrong(
        "[[route]]\nupstream = \"wep\"",
        "routes.d/z.toml:2:12: route.upstream: there is no upstream \"wep\"; web?",
    );
    wrong(
        "\n[[route]]\npath = \"/a\"\nupstream = \"web\"",
        "routes.d/z.toml:3:8: this route can never be reached: the one in ",
    );
}

#[test]
fn variables_override_the_file() {
    let folder = Folder::new();
    let path = folder.file("gateway.toml", &format!("server = {{ shards = 0 }}\n{WEB}"));
    assert_eq!(checks(&path, &[]).0, 2);
    assert_eq!(checks(&path, &[("RINGSERVE_SERVER__SHARDS", "2"), ("RINGSERVE_DRIVER", "epoll")]).0, 0);
    let wrong = |name: &str, value: &str, wanted: &str| {
        let (code, said) = checks(&path, &[("RINGSERVE_SERVER__SHARDS", "2"), (name, value)]);
        assert!(code == 2 && said.contains(wanted), "{said}");
    };
    wrong(
        "RINGSERVE_SERVER__SHARDS",
        "two",
        "RINGSERVE_SERVER__SHARDS: server.shards: \"two\" is not a number from 1 to 1024",
    );
    wrong(
        "RINGSERVE_SERVER__SHARD",
        "2",
        "RINGSERVE_SERVER__SHARD: server.shard: there is no such setting; shards?",
    );
    wrong(
        "RINGSERVE_UPSTREAM__WEB__QUEUE",
        "soon",
        "RINGSERVE_UPSTREAM__WEB__QUEUE: upstream.web.queue: \"soon\" is not a time",
    );
}
