//! Requests that the endpoint must not carry out.

use ringserve::admin::Admin;
use ringserve_tests::Client;

use super::{LOCAL, ask, endpoint, exchange, get, lab, post};

/// A request as a browser sends it for a page of another site, whose name was made to resolve to
/// 127.0.0.1.
fn rebound(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")
}

#[test]
fn page_of_another_site_reads_nothing() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let port = addr.port();
    for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1"] {
        for path in ["/", "/report.json", "/metrics", "/events", "/connections", "/nothing"] {
            let answer = exchange(addr, rebound(&format!("{host}:{port}"), path));
            assert_eq!(answer.status, 403, "{host} {path}");
            assert!(
                answer.text().contains("Admin::host_name") && !answer.text().contains("uptime"),
                "{host}"
            );
        }
    }
    let none = exchange(addr, rebound(&format!("evil.example@localhost:{port}"), "/"));
    assert_eq!(none.status, 400, "a host of no form that there is");
    let target = format!(
        "GET http://evil.example:{port}/metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    );
    assert_eq!(exchange(addr, target).status, 403);
    let none = exchange(addr, "GET /metrics HTTP/1.0\r\n\r\n");
    assert_eq!(none.status, 403);
    for host in ["localhost", &format!("localhost:{port}"), &format!("127.0.0.1:{port}"), "LOCALHOST:1"] {
        assert_eq!(exchange(addr, rebound(host, "/metrics")).status, 200, "{host}");
    }
    lab.finish();
}

#[test]
fn page_of_another_site_has_no_effect() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let mut client = lab.client();
    client.echoes("x");
    let foreign = "origin: http://evil.example";
    for path in
        ["/drain", "/connections/0.0.0/close", "/connections/1.0.0/close", "/log-level", "/admission/deny"]
    {
        // A form, or a fetch without reading.
        let form = ["content-type: application/x-www-form-urlencoded", foreign];
        assert_eq!(ask(addr, "POST", path, &form, "a=b").status, 403, "{path}");
        assert_eq!(ask(addr, "POST", path, &["content-type: text/plain"], "").status, 403, "{path}");
        // With the header, if a preflight let it pass.
        for origin in [foreign, "origin: null", "origin: http://localhost:1"] {
            assert_eq!(
                ask(addr, "POST", path, &["x-ringserve: 1", origin], "").status,
                403,
                "{path} {origin}"
            );
        }
        let preflight =
            ["access-control-request-method: POST", "access-control-request-headers: x-ringserve", foreign];
        let answer = ask(addr, "OPTIONS", path, &preflight, "");
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (405, None), "{path}");
    }
    client.echoes("it is still there");
    assert!(!lab.running.control().is_draining());
    drop(client);
    lab.finish();
}

#[test]
fn own_page_may_close_connections() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let host = format!("localhost:{}", addr.port());
    let request = format!(
        "POST /connections/0.5.0/close HTTP/1.1\r\nhost: {host}\r\norigin: http://{host}\r\nx-ringserve: 1\r\n\
         connection: close\r\ncontent-length: 0\r\n\r\n"
    );
    assert_eq!(exchange(addr, request).status, 202);
    lab.finish();
}

#[test]
fn token_is_asked_for_where_it_matters() {
    let lab = lab(Admin::new("0.0.0.0:0").token("correct-horse-battery").host_name("ops.internal"));
    let addr = (std::net::Ipv4Addr::LOCALHOST, endpoint(&lab.running).port()).into();
    let right = "authorization: Bearer correct-horse-battery";
    for path in ["/report.json", "/metrics", "/events", "/connections", "/stalls", "/doctor"] {
        let without = get(addr, path);
        assert_eq!((without.status, without.header("www-authenticate")), (401, Some("Bearer")), "{path}");
        assert_eq!(
            ask(addr, "GET", path, &["authorization: Bearer correct-horse-batterz"], "").status,
            401,
            "{path}"
        );
        if path != "/events" {
            assert_eq!(ask(addr, "GET", path, &[right], "").status, 200, "{path}");
        }
    }
    for path in ["/drain", "/connections/0.0.0/close", "/log-level"] {
        assert_eq!(post(addr, path, "").status, 401, "{path}");
        assert_eq!(ask(addr, "POST", path, &[right], "").status, 403, "{path}: the header is wanted too");
    }
    for path in ["/", "/healthz", "/readyz"] {
        assert_eq!(get(addr, path).status, 200, "{path}: a page without figures, and probes");
    }
    // It listens at all addresses, so each may be its own; only the given names are accepted.
    for (host, status) in [("192.0.2.7:80", 200), ("ops.internal", 200), ("evil.example", 403)] {
        assert_eq!(exchange(addr, rebound(host, "/")).status, status, "{host}");
        assert_eq!(exchange(addr, rebound(host, "/healthz")).status, 200, "{host} is where a probe was sent");
    }
    lab.finish();
}

#[test]
fn token_for_reading_gives_no_order() {
    let lab = lab(Admin::new(LOCAL).token("correct-horse-battery").read_token("staple-staple-staple"));
    let addr = endpoint(&lab.running);
    let [orders, reads] = ["correct-horse-battery", "staple-staple-staple"]
        .map(|token| format!("authorization: Bearer {token}"));
    let header = "x-ringserve: 1";
    for path in ["/report.json", "/metrics", "/connections", "/stalls", "/doctor", "/admission"] {
        for token in [&orders, &reads] {
            assert_eq!(ask(addr, "GET", path, &[token], "").status, 200, "{path}");
        }
        assert_eq!(get(addr, path).status, 401, "{path}");
    }
    for path in ["/connections/0.0.0/close", "/log-level", "/admission/deny?network=192.0.2.0/24", "/drain"] {
        let refused = ask(addr, "POST", path, &[&reads, header], "");
        assert_eq!(
            (refused.status, refused.text()),
            (403, "this token may read, and gives no orders\n"),
            "{path}"
        );
        assert_eq!(post(addr, path, "").status, 401, "{path}");
    }
    assert!(!lab.running.control().is_draining());
    assert_eq!(ask(addr, "POST", "/connections/0.0.0/close", &[&orders, header], "").status, 202);
    lab.finish();
}

#[test]
fn paths_that_climb_lead_nowhere() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    for path in [
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/metrics/../../etc/passwd",
        "/connections/../../../etc/passwd/close",
        "/connections/0.0.0/../../drain",
        "/page.html",
        "/\\..\\..\\etc",
        "/metrics%00",
    ] {
        let answer = get(addr, path);
        assert!([400, 404].contains(&answer.status), "{path}: {}", answer.status);
        assert!(!answer.text().contains("root:"), "{path}");
    }
    lab.finish();
}

#[test]
fn garbage_ends_its_own_connection_alone() {
    let lab = lab(LOCAL);
    let addr = endpoint(&lab.running);
    let long_path = format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "a".repeat(20_000));
    let long_head = format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "a".repeat(20_000));
    let many = format!("GET / HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "x: y\r\n".repeat(500));
    for (what, bytes) in [
        ("zeros", vec![0; 1000]),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".repeat(20)),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec()),
        ("a long path", long_path.into_bytes()),
        ("a long header", long_head.into_bytes()),
        ("many headers", many.into_bytes()),
        ("no version", b"GET /\r\n\r\n".to_vec()),
        (
            "two lengths",
            b"POST /drain HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab"
                .to_vec(),
        ),
    ] {
        let mut client = Client::connect(addr);
        client.write(&bytes);
        let (answer, _) = client.read_to_end();
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{what}: {}",
            String::from_utf8_lossy(&answer)
        );
        assert_eq!(get(addr, "/healthz").status, 200, "behind {what}");
    }
    assert!(!lab.running.control().is_draining());
    lab.finish();
}
