//! Gateways that serve, and read their file again.

use std::process::{Command, Stdio};

use ringserve_gateway::config::{GatewayFile, GatewayServer};

use super::*;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringserve-gateway");

fn file(listen: SocketAddr, upstreams: &str, routes: &str) -> String {
    format!(
        "admin = false\nserver = {{ shards = 1 }}\n{upstreams}\n[[service]]\nlisten = [\"{listen}\"]\n{routes}\n"
    )
}

fn upstream(name: &str, addr: SocketAddr) -> String {
    format!("[upstream.{name}]\naddresses = [\"{addr}\"]\n")
}

fn route(path: &str, upstream: &str) -> String {
    format!("[[route]]\npath = \"{path}\"\nupstream = \"{upstream}\"\n")
}

#[test]
fn file_is_replaced_as_a_whole_or_not_at_all() {
    let (folder, one, two) = (Folder::new(), backend("one"), backend("two"));
    let any = "127.0.0.1:0".parse().expect("an address");
    let first = file(any, &upstream("web", one), &route("/*", "web"));
    let path = folder.file("gateway.toml", &first);
    let server = GatewayServer::new(GatewayFile::read(&path).expect("it is right")).expect("a server");
    let reloader = server.reloader();
    let running = server.start().expect("it starts");
    let addr = running.local_addrs()[0];
    assert_eq!(ask(addr, "GET", "/a"), (200, "one".into()));

    // Its upstreams are right and would change, its routes are wrong.
    folder
        .file("gateway.toml", &file(any, &upstream("web", two), &(route("/*", "web") + &route("/*", "web"))));
    let error = reloader.reload().expect_err("a route that cannot be reached").to_string();
    assert!(error.contains("gateway.toml:") && error.contains("can never be reached"), "{error}");
    assert_eq!(ask(addr, "GET", "/a"), (200, "one".into()));

    folder.file("gateway.toml", &file(any, &upstream("web", two), &route("/b", "web")));
    assert!(reloader.reload().expect("it is right").ends_with("read again, 1 upstreams"));
    assert_eq!(ask(addr, "GET", "/a").0, 404);
    assert_eq!(ask(addr, "GET", "/b"), (200, "two".into()));

    folder.file("gateway.toml", &first.replace("shards = 1", "shards = 2"));
    assert!(reloader.reload().expect("it is right").contains("takes a restart"));
    assert_eq!(ask(addr, "GET", "/a"), (200, "one".into()));
    running.shutdown();
    running.wait().expect("it ends");
}

#[test]
fn bytes_are_relayed_where_the_mode_is_tcp() {
    let (folder, one) = (Folder::new(), backend("one"));
    let text = format!(
        "admin = false\n{}\n[[service]]\nlisten = [\"127.0.0.1:0\"]\nmode = \"tcp\"\nupstream = \"web\"\n",
        upstream("web", one)
    );
    let path = folder.file("gateway.toml", &text);
    let server = GatewayServer::new(GatewayFile::read(&path).expect("it is right")).expect("a server");
    let running = server.start().expect("it starts");
    let mut stream = TcpStream::connect(running.local_addrs()[0]).expect("a connection");
    // No word of HTTP is read: the gateway would refuse this path.
    stream.write_all(b"GET //\r\n\r\n").expect("it is sent");
    stream.shutdown(std::net::Shutdown::Write).expect("an end");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.ends_with("\r\n\r\none"), "{answer}");
    running.shutdown();
    running.wait().expect("it ends");
}

#[test]
fn operators_see_upstreams_and_reload_by_the_admin_port() {
    let (folder, one, admin) = (Folder::new(), backend("one"), free_port());
    let any = "127.0.0.1:0".parse().expect("an address");
    let text = file(any, &upstream("web", one), &route("/*", "web"))
        .replace("admin = false", &format!("admin = {{ listen = \"{admin}\" }}"));
    let path = folder.file("gateway.toml", &text);
    let server = GatewayServer::new(GatewayFile::read(&path).expect("it is right")).expect("a server");
    let running = server.start().expect("it starts");
    let (status, text) = ask(admin, "GET", "/gateway/upstreams");
    assert_eq!(status, 200);
    assert!(text.starts_with("web: ") && text.contains(&one.to_string()), "{text}");
    assert_eq!(ask(admin, "POST", "/gateway/reload").0, 200);
    folder.file("gateway.toml", "what");
    let (status, text) = ask(admin, "POST", "/gateway/reload");
    assert_eq!(status, 422);
    assert!(text.contains("gateway.toml:1:"), "{text}");
    running.shutdown();
    running.wait().expect("it ends");
}

#[test]
fn program_ends_with_the_status_that_says_why() {
    let folder = Folder::new();
    let run = |path: &Path, check: bool| {
        let mut command = Command::new(PROGRAM);
        command.arg("--config").arg(path).args(check.then_some("--check"));
        let output = command.output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(run(&example(), true).0, Some(0));
    let (status, error) = run(&folder.file("bad.toml", "what = 1\n"), false);
    assert_eq!(status, Some(2));
    assert!(error.contains("bad.toml:1:1: "), "{error}");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let text = file(taken.local_addr().expect("an address"), "", "");
    assert_eq!(run(&folder.file("taken.toml", &text), false).0, Some(1));
}

#[test]
fn program_reads_its_file_again_on_sighup() {
    let (folder, one, two, addr) = (Folder::new(), backend("one"), backend("two"), free_port());
    let path = folder.file("gateway.toml", &file(addr, &upstream("web", one), &route("/*", "web")));
    let mut child =
        Command::new(PROGRAM).arg("--config").arg(&path).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut lines = BufReader::new(child.stdout.take().expect("its log")).lines();
    let mut line_with = |words: &str| {
        let line = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains(words)));
        line.expect("a line").expect("text")
    };
    line_with("listening");
    assert_eq!(ask(addr, "GET", "/"), (200, "one".into()));
    let hang_up = || {
        let status = Command::new("kill").args(["-HUP", &child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    };
    folder.file("gateway.toml", &file(addr, &upstream("web", two), &route("/*", "wbe")));
    hang_up();
    assert!(line_with("gateway.toml:").contains("web?"));
    assert_eq!(ask(addr, "GET", "/"), (200, "one".into()));
    folder.file("gateway.toml", &file(addr, &upstream("web", two), &route("/*", "web")));
    hang_up();
    line_with("read again");
    assert_eq!(ask(addr, "GET", "/"), (200, "two".into()));
    let status = Command::new("kill").arg(child.id().to_string()).status();
    assert!(status.expect("kill runs").success());
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}
