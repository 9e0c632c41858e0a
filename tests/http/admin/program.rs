//! Additions of a program to the endpoint: paths, collectors and figures, and orders that outlive
//! it.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex};

use ringserve::admin::{Admin, AdminAnswer, AdminRoute};
use ringserve::admission::Admission;
use ringserve::framing::LengthPrefix;
use ringserve::metrics::Figures;
use ringserve::metrics::prometheus_client::collector::Collector;
use ringserve::metrics::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use ringserve::metrics::prometheus_client::metrics::gauge::ConstGauge;
use ringserve_tests::openmetrics;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{Answer, LOCAL, ask, endpoint, get, lab, post, refused};

/// Holds threads until it is opened, or for a long time.
#[derive(Debug, Default)]
struct Latch {
    /// Number of threads that came, and whether it is open.
    state: Mutex<(usize, bool)>,
    opened: Condvar,
}

impl Latch {
    fn wait(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        drop(self.opened.wait_timeout_while(state, SOON, |state| !state.1).unwrap());
    }

    fn came(&self) -> usize {
        self.state.lock().unwrap().0
    }

    fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.opened.notify_all();
    }
}

/// Sends a request without waiting for its answer.
fn begin_to_ask(addr: SocketAddr, method: &str, path: &str) -> Client {
    let mut client = Client::connect(addr);
    let head = "host: localhost\r\nx-ringserve: 1\r\ncontent-length: 0\r\nconnection: close";
    client.write(format!("{method} {path} HTTP/1.1\r\n{head}\r\n\r\n").as_bytes());
    client
}

#[test]
fn routes_answer_what_the_program_says() {
    let echo = |request: &ringserve::admin::AdminRequest| {
        let of = [request.path(), request.rest(), request.query().unwrap_or("-")].join(" ");
        let name = request.parameter("name").unwrap_or_default();
        let connections = request.server().map(|server| server.stats().connections);
        format!("{of} {name} {connections:?} {}", String::from_utf8_lossy(request.body()))
    };
    let admin = Admin::new(LOCAL)
        .route(AdminRoute::get("/app/*", echo).about("says what was asked"))
        .route(AdminRoute::get("/app/state", |_request| AdminAnswer::json("{\"a\":1}")))
        .route(AdminRoute::post("/app/state", echo))
        .route(AdminRoute::get("/app/wrong", |_request| AdminAnswer::error(409, "not now")))
        .route(AdminRoute::get("/app/page", |_request| AdminAnswer::new("text/html; charset=utf-8", "<p>")));
    let lab = lab(admin);
    let addr = endpoint(&lab.running);
    let of = |answer: Answer| {
        (answer.status, answer.header("content-type").unwrap().to_owned(), answer.text().to_owned())
    };
    let text = || "text/plain; charset=utf-8".to_owned();
    let found = get(addr, "/app/x/y%20z?name=a%2Fb&c");
    assert_eq!(of(found), (200, text(), "/app/x/y%20z x/y%20z name=a%2Fb&c a/b Some(0) ".to_owned()));
    let found = get(addr, "/app/state");
    assert_eq!(found.header("cache-control"), Some("no-store"));
    assert_eq!(of(found), (200, "application/json".to_owned(), "{\"a\":1}".to_owned()));
    assert_eq!(of(get(addr, "/app/wrong")), (409, text(), "not now\n".to_owned()));
    assert_eq!(get(addr, "/app/page").header("content-type"), Some("text/html; charset=utf-8"));
    let head = ask(addr, "HEAD", "/app/state", &[], "");
    assert_eq!((head.status, head.header("content-length"), head.body.len()), (200, Some("7"), 0));
    assert_eq!(post(addr, "/app/state", "body").text(), "/app/state  -  Some(0) body");
    // An order must be intentional, and sent with its method.
    assert_eq!(ask(addr, "POST", "/app/state", &[], "").status, 403);
    let other = ask(addr, "PUT", "/app/state", &[], "");
    assert_eq!((other.status, other.header("allow")), (405, Some("GET, HEAD, POST")));
    let large = post(addr, "/app/state", &"x".repeat((64 << 10) + 1));
    assert_eq!(large.status, 413);
    let none = get(addr, "/nothing");
    assert_eq!(none.status, 404);
    let words = none.text().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("GET /app/* says what was asked") && words.contains("POST /app/state"), "{words}");
    lab.finish();
}

#[test]
fn routes_lie_behind_the_token_and_the_name() {
    let admin = Admin::new(LOCAL)
        .named_token("anna", "correct-horse-battery")
        .named_token("deploy", "battery-horse-correct")
        .read_token("staple-staple-staple")
        .route(AdminRoute::get("/app", |request| request.token_name().unwrap_or("none").to_owned()))
        .route(AdminRoute::post("/app", |request| request.token_name().unwrap_or("none").to_owned()))
        .route(AdminRoute::get("/open", |request| request.token_name().unwrap_or("none").to_owned()).open());
    let lab = lab(admin);
    let addr = endpoint(&lab.running);
    let with = |method: &str, path: &str, token: &str| {
        let token = format!("authorization: Bearer {token}");
        let answer = ask(addr, method, path, &["x-ringserve: 1", &token], "");
        (answer.status, answer.text().trim_end().to_owned())
    };
    let name = |name: &str| (200, name.to_owned());
    for method in ["GET", "POST"] {
        assert_eq!(with(method, "/app", "correct-horse-battery"), name("anna"));
        assert_eq!(with(method, "/app", "battery-horse-correct"), name("deploy"));
        assert_eq!(with(method, "/app", "battery-horse-batterz").0, 401);
    }
    assert_eq!(with("GET", "/app", "staple-staple-staple"), name("read_token"));
    assert_eq!(with("POST", "/app", "staple-staple-staple").0, 403);
    assert_eq!(get(addr, "/app").status, 401);
    assert_eq!((get(addr, "/open").status, get(addr, "/open").text()), (200, "none"));
    let foreign =
        super::exchange(addr, "GET /open HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n");
    assert_eq!(foreign.status, 403);
    lab.finish();
}

/// Routes that hang take their eight places, and no probe's.
#[test]
fn slow_routes_hold_up_no_other_path() {
    let latch = Arc::new(Latch::default());
    let held = latch.clone();
    let slow = AdminRoute::get("/slow", move |_request| {
        held.wait();
        "done"
    });
    let lab = lab(Admin::new(LOCAL).route(slow).route(AdminRoute::get("/open", |_request| "done").open()));
    let addr = endpoint(&lab.running);
    let mut waiting: Vec<Client> = (0..8).map(|_| begin_to_ask(addr, "GET", "/slow")).collect();
    eventually("all run", SOON, || latch.came() == 8);
    for path in ["/healthz", "/readyz", "/metrics", "/report.json", "/doctor", "/stalls"] {
        assert_eq!(get(addr, path).status, 200, "{path}");
    }
    let ninth = get(addr, "/slow");
    assert_eq!((ninth.status, ninth.header("retry-after")), (503, Some("5")));
    assert_eq!(get(addr, "/open").status, 503, "it has no places beside");
    latch.open();
    for client in &mut waiting {
        assert_eq!(Answer::of(&client.read_to_end().0).text(), "done");
    }
    assert_eq!(get(addr, "/slow").status, 200);
    lab.finish();
}

#[test]
fn open_routes_leave_room_for_those_behind_the_token() {
    let latch = Arc::new(Latch::default());
    let held = latch.clone();
    let open = AdminRoute::get("/open", move |_request| {
        held.wait();
        "done"
    });
    let lab =
        lab(Admin::new(LOCAL).route(open.open()).route(AdminRoute::post("/order", |_request| "carried out")));
    let addr = endpoint(&lab.running);
    let mut waiting: Vec<Client> = (0..4).map(|_| begin_to_ask(addr, "GET", "/open")).collect();
    eventually("all run", SOON, || latch.came() == 4);
    let fifth = get(addr, "/open");
    assert!(fifth.status == 503 && fifth.text().contains("open paths"), "{}", fifth.text());
    assert_eq!(post(addr, "/order", "").text(), "carried out");
    latch.open();
    for client in &mut waiting {
        assert_eq!(Answer::of(&client.read_to_end().0).text(), "done");
    }
    lab.finish();
}

#[test]
fn route_that_panics_or_says_too_much_is_a_500() {
    let admin = Admin::new(LOCAL)
        .route(AdminRoute::get("/panics", |_request| -> &'static str { panic!("planted") }))
        .route(AdminRoute::get("/large", |_request| "x".repeat((1 << 20) + 1)))
        .route(AdminRoute::get("/odd", |_request| AdminAnswer::from("").status(42)));
    let lab = lab(admin);
    let addr = endpoint(&lab.running);
    for path in ["/panics", "/large", "/odd", "/panics"] {
        let answer = get(addr, path);
        assert_eq!(answer.status, 500, "{path}");
        assert!(!answer.text().contains("planted"), "what it panicked with is for the log");
    }
    assert_eq!(get(addr, "/healthz").status, 200);
    lab.finish();
}

#[test]
fn routes_and_figures_that_cannot_be_are_errors_of_the_start() {
    let route = |path: &str| Admin::new(LOCAL).route(AdminRoute::get(path, |_request| ""));
    assert!(refused(route("/metrics")).contains("the endpoint's own"));
    assert!(refused(route("app")).contains("is none"));
    let figures = Figures::default();
    let _ = figures.counter("app_a", "A", []);
    let _ = figures.gauge("app_a", "A", []);
    let error = refused(Admin::new(LOCAL).figures(&figures));
    assert!(error.contains("Admin::figures") && error.contains("\"app_a\" is there twice"), "{error}");
    assert!(refused(Admin::new(LOCAL).named_token("a b", "correct-horse-battery")).contains("name"));
}

/// Answers with its text, panics, or hangs.
#[derive(Debug)]
struct Planted(&'static str, Arc<Latch>);

impl Collector for Planted {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> std::fmt::Result {
        match self.0 {
            "panics" => panic!("planted"),
            "hangs" => self.1.wait(),
            _ => {}
        }
        let gauge = ConstGauge::new(7i64);
        gauge.encode(to.encode_descriptor(self.0, "Planted", None, gauge.metric_type())?)
    }
}

#[test]
fn metrics_have_those_of_the_program() {
    let figures = Figures::default();
    let counted = figures.counter("app_lines", "Lines", ["of"]);
    let latch = Arc::new(Latch::default());
    let admin = Admin::new(LOCAL)
        .figures(&figures)
        .collector(Planted("app_one", latch.clone()))
        .collector(Planted("panics", latch.clone()))
        .collector(Planted("app_one", latch.clone()))
        .collector(Planted("app_two", latch));
    let lab = lab(admin);
    let addr = endpoint(&lab.running);
    let counter = counted.with(["test"]);
    counter.add(3);
    let families = openmetrics::parse(get(addr, "/metrics").text()).unwrap();
    let of = |sample: &str| families.values().find_map(|family| family.samples.get(sample).copied());
    assert_eq!(of("app_lines_total{of=\"test\"}"), Some(3.0));
    assert_eq!(
        (of("app_one"), of("app_two"), of("ringserve_collectors_left_out")),
        (Some(7.0), Some(7.0), Some(2.0))
    );
    assert!(families.contains_key("ringserve_build_info") && families.contains_key("process_open_fds"));
    lab.finish();
}

#[test]
fn collector_that_hangs_costs_its_own_figures_alone() {
    let latch = Arc::new(Latch::default());
    let lab = lab(Admin::new(LOCAL).collector(Planted("hangs", latch.clone())));
    let addr = endpoint(&lab.running);
    let mut first = Client::connect(addr);
    first.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    eventually("it hangs", SOON, || latch.came() == 1);
    assert_eq!(get(addr, "/healthz").status, 200);
    latch.open();
    assert!(Answer::of(&first.read_to_end().0).text().contains("\nhangs 7\n"));
    lab.finish();
}

#[test]
fn metrics_come_in_the_format_that_is_accepted() {
    let figures = Figures::default();
    let _lines = figures.counter("app_lines", "Lines", []).with([]);
    let lab = lab(Admin::new(LOCAL).figures(&figures));
    let addr = endpoint(&lab.running);
    let with = |accept: &str| ask(addr, "GET", "/metrics", &[&format!("accept: {accept}")], "");
    for accept in ["*/*", "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"] {
        let answer = with(accept);
        assert_eq!(
            answer.header("content-type"),
            Some(ringserve::metrics::Metrics::CONTENT_TYPE),
            "{accept}"
        );
        assert!(openmetrics::parse(answer.text()).is_ok());
    }
    let answer = with("text/plain;version=0.0.4");
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = answer.text();
    assert!(text.contains("# TYPE app_lines_total counter\napp_lines_total 0\n"), "{text}");
    assert!(text.contains("# TYPE ringserve_turns_total counter\n") && !text.contains("# EOF"), "{text}");
    lab.finish();
}

fn kept(file: &std::path::Path) -> Lab {
    let admin = Admin::new(LOCAL).keep_admission(file);
    let on = On::default().server(no_time_limits()).shards(1).admin(admin);
    Lab::of(on.admission(Admission::default().adjustable()).framing(LengthPrefix::default()))
}

#[test]
fn orders_on_admission_outlive_the_process() {
    let file = std::env::temp_dir().join(format!("ringserve-admission-{}", std::process::id()));
    let lab = kept(&file);
    let addr = endpoint(&lab.running);
    for path in [
        "/admission/deny?network=192.0.2.0/24,10.1.0.0/16&seconds=600",
        "/admission/forget?network=10.1.0.0/16",
        // A whole family is named twice, and kept once.
        "/admission/deny?network=::/0,::/0&seconds=60",
        "/admission/limit?per_address=20",
    ] {
        let answer = post(addr, path, "");
        assert!(answer.status == 200 && !answer.text().contains("restart"), "{path}: {}", answer.text());
    }
    assert_eq!(post(addr, "/admission/limit?per_address=0", "").status, 400, "it is not kept either");
    lab.finish();
    let lab = kept(&file);
    let settings = lab.running.control().admission().settings();
    assert_eq!(settings[0].per_address, Some(20));
    let [timed, family] = &settings[0].timed[..] else { panic!("{settings:?}") };
    assert_eq!((&*timed.network, timed.allows), ("192.0.2.0/24", false));
    assert!((61..=600).contains(&timed.left.as_secs()), "{:?}", timed.left);
    assert_eq!((&*family.network, family.allows), ("::/0", false));
    assert!((1..=60).contains(&family.left.as_secs()), "{:?}", family.left);
    lab.finish();
    fs::write(&file, "deny all peers\n").unwrap();
    let error = refused(Admin::new(LOCAL).keep_admission(&file));
    assert!(error.contains("line 1") && error.contains(file.to_str().unwrap()), "{error}");
    // Its disk is full, or missing: the order holds, and its answer reports that.
    fs::remove_file(&file).unwrap();
    let lab = kept(&file);
    let beside = file.with_extension("new");
    fs::create_dir(&beside).unwrap();
    let answer = post(endpoint(&lab.running), "/admission/limit?per_address=5", "");
    assert_eq!(answer.status, 200);
    assert!(answer.text().contains("may be gone after a restart"), "{}", answer.text());
    assert_eq!(lab.running.control().admission().settings()[0].per_address, Some(5));
    fs::remove_dir(&beside).unwrap();
    lab.finish();
}

/// The disk hangs for the first, which fails at last; the second waits for it, and writes what the
/// third noted.
#[test]
fn order_behind_one_that_waits_for_the_disk_is_written_with_it() {
    let file = std::env::temp_dir().join(format!("ringserve-slow-disk-{}", std::process::id()));
    let (beside, aside) = (file.with_extension("new"), file.with_extension("aside"));
    let lab = kept(&file);
    let (addr, control) = (endpoint(&lab.running), lab.running.control().admission());
    mknodat(CWD, &beside, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let mut first = begin_to_ask(addr, "POST", "/admission/limit?per_address=20");
    eventually("it holds", SOON, || control.settings()[0].per_address == Some(20));
    let mut second = begin_to_ask(addr, "POST", "/admission/limit?connections_max=2000");
    eventually("it holds", SOON, || control.settings()[0].connections_max == Some(2000));
    let third = post(addr, "/admission/limit?per_address=30", "");
    assert!(third.text().contains("per_address is 30; it is written"), "{}", third.text());
    // A thread that opens it for writing continues once there is a reader.
    fs::rename(&beside, &aside).unwrap();
    let _reader = File::open(&aside).unwrap();
    let first = Answer::of(&first.read_to_end().0);
    assert!(first.text().contains("may be gone after a restart"), "{}", first.text());
    let second = Answer::of(&second.read_to_end().0);
    assert!(second.status == 200 && !second.text().contains("restart"), "{}", second.text());
    lab.finish();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\nlimit connections_max 2000\nlimit per_address 30\n"), "{text}");
    fs::remove_file(&aside).unwrap();
    fs::remove_file(&file).unwrap();
}
