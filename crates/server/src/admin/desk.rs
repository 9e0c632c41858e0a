//! The endpoint's one shard: it samples the server each second, writes reports while they are
//! wanted, and answers requests.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use ringserve_base::doctor::Workload;
use ringserve_base::lines::LineLimit;
use ringserve_base::lines::info;
use ringserve_core::{ConnId, Time};
use ringserve_drivers::guarded;
use ringserve_report::{Connections, Finding, Report};

use super::LogLevel;
use super::admission;
use super::answer::{self, Answer, Events, JSON};
use super::aside::{
    Aside, DOCTORS_AT_ONCE, NotDone, OPEN_ROUTES_AT_ONCE, ROUTES_AT_ONCE, SCRAPES_AT_ONCE, WITHIN,
    WRITES_AT_ONCE,
};
use super::caller::{BodyError, OrderRecord, Who, read_body};
use super::gate::Gate;
use super::guests::{Guest, Guests};
use super::history::History;
use super::kept::KeptOrders;
use super::press::{LISTENERS_MAX, Press};
use super::program::{AdminRoute, ProgramRoutes};
use super::reports::{self, Lists};
use super::routes::{Route, parameters};
use super::sources::{connection, findings, stall};
use super::target::{Running, Target};
use crate::inspect::{By, Inspection, Query};
use crate::metrics::Figures;
use crate::metrics::prometheus_client::collector::Collector;
use crate::metrics::scrape::Collectors;
use crate::overload::Load;
use crate::shard::face::handle::Shard;

const SECOND: Duration = Duration::from_secs(1);

/// Shards have this long to answer for the lists of a report, so that one that is blocked delays it
/// by no more.
const LISTS_WITHIN: Duration = Duration::from_millis(250);

/// And this long for `/connections`, which is asked for by hand.
const CONNECTIONS_WITHIN: Duration = Duration::from_secs(1);

/// A list costs the shards a walk through their tables, 10 ns a connection and more. So for each of
/// these connections the lists are made a second later: at a million each 21 s, which is a
/// thousandth of a core.
const CONNECTIONS_A_SECOND: usize = 50_000;

/// The doctor reads some fifty files.
const FINDINGS_EVERY: Duration = Duration::from_secs(60);

/// A shard that has not gone on for longer is as good as dead.
const DEAD_AFTER: Duration = Duration::from_secs(10);

/// A filter of the log is a line.
const FILTER_BYTES_MAX: usize = 1024;

/// The most connections that `/connections` shows.
const LIMIT_MAX: usize = 1000;

/// Requests of one address that are answered at once, without probes: a browser has six, and
/// programs on this machine have the same address.
const ASKING_MAX: usize = 12;

/// The settings of the endpoint.
pub(super) struct Settings {
    pub(super) gate: Gate,
    pub(super) log_level: Option<LogLevel>,
    pub(super) target: Arc<Target>,
    pub(super) program: Program,
    pub(super) kept: Option<Arc<KeptOrders>>,
}

/// The program's additions to the endpoint.
pub(super) struct Program {
    pub(super) routes: ProgramRoutes,
    pub(super) collectors: Arc<Collectors>,
}

impl Program {
    /// # Errors
    /// A sentence with the cause.
    pub(super) fn check(
        routes: Vec<AdminRoute>,
        collectors: Vec<Box<dyn Collector>>,
        figures: Vec<Figures>,
    ) -> Result<Program, String> {
        let mut all = Collectors::default();
        for figures in figures {
            figures.check().map_err(|error| format!("Admin::figures: {error}"))?;
            all.add(Box::new(figures));
        }
        collectors.into_iter().for_each(|collector| all.add(collector));
        Ok(Program { routes: ProgramRoutes::check(routes)?, collectors: Arc::new(all) })
    }
}

/// The state of the endpoint's shard.
pub(super) struct Desk {
    pub(super) shard: Shard,
    pub(super) settings: Arc<Settings>,
    /// The threads on which code of the program runs, and the disk is waited for.
    pub(super) routes: Aside,
    pub(super) open_routes: Aside,
    pub(super) scrapes: Aside,
    pub(super) writes: Aside,
    doctor: Aside,
    /// Orders that were refused.
    pub(super) refused: RefCell<LineLimit>,
    press: Rc<Press>,
    history: RefCell<History>,
    lists: RefCell<(Lists, Option<Time>)>,
    findings: RefCell<Vec<Finding>>,
    /// When the doctor was asked last.
    examined: Cell<Option<Time>>,
}

impl Desk {
    /// Begins to sample.
    pub(super) fn begin(shard: &Shard, settings: Arc<Settings>) -> Rc<Desk> {
        let routes = Aside::new(ROUTES_AT_ONCE);
        let desk = Rc::new(Desk {
            shard: shard.clone(),
            settings,
            open_routes: routes.part(OPEN_ROUTES_AT_ONCE),
            routes,
            scrapes: Aside::new(SCRAPES_AT_ONCE),
            writes: Aside::new(WRITES_AT_ONCE),
            doctor: Aside::new(DOCTORS_AT_ONCE),
            refused: RefCell::default(),
            press: Rc::default(),
            history: RefCell::default(),
            lists: RefCell::default(),
            findings: RefCell::default(),
            examined: Cell::default(),
        });
        shard.spawn_named("admin reports", desk.clone().write());
        desk
    }

    pub(super) fn running(&self) -> Option<&Running> {
        self.settings.target.running()
    }

    /// The task that samples and writes reports.
    async fn write(self: Rc<Self>) {
        let mut seconds = self.shard.interval(SECOND);
        loop {
            let ticked = {
                let mut tick = pin!(seconds.tick());
                poll_fn(|task| match tick.as_mut().poll(task) {
                    Poll::Ready(_) => Poll::Ready(true),
                    Poll::Pending => self.press.poll_asked(task).map(|()| false),
                })
                .await
            };
            let asked = poll_fn(|task| Poll::Ready(self.press.poll_asked(task).is_ready())).await;
            let writes = asked || (ticked && self.press.has_listeners());
            // A report has a reading, too, and one a second is enough.
            if ticked
                && !writes
                && let Some(running) = self.running()
            {
                self.history.borrow_mut().push(running.read().sample);
            }
            if writes {
                let number = self.press.begin();
                let at = self.shard.now();
                let report = self.report(ticked).await;
                let json = serde_json::to_vec(&report).unwrap_or_default();
                self.press.publish(number, at, &json);
            }
        }
    }

    /// A report of now. Its reading is kept as the sample of this second if it is `sampled`.
    async fn report(self: &Rc<Self>, sampled: bool) -> Report {
        let Some(running) = self.running() else { return reports::starting() };
        self.examine().await;
        self.list(running).await;
        let reading = running.read();
        let mut history = self.history.borrow_mut();
        let then = (history.before(&reading.sample), history.second_ago(&reading.sample));
        if sampled {
            history.push(reading.sample.clone());
        }
        let then = (&*then.0, &*then.1);
        reports::report(running, reading, then, &self.lists.borrow().0, self.findings.borrow().clone())
    }

    /// Makes the lists of connections again, if they are due.
    async fn list(&self, running: &Running) {
        let now = self.shard.now();
        let connections = running.control.stats().connections;
        let every =
            LISTS_WITHIN / 2 + SECOND * u32::try_from(connections / CONNECTIONS_A_SECOND).unwrap_or(u32::MAX);
        if self.lists.borrow().1.is_some_and(|at| now - at < every) {
            return;
        }
        let outboxes = running.control.inspecting(Query::connections().by(By::Outbox).limit(10));
        let waiting = running.control.inspecting(Query::calls_waiting().limit(20));
        let both = async {
            outboxes.done().await;
            waiting.done().await;
        };
        let _ = self.shard.timeout(LISTS_WITHIN, both).await;
        let mut lists = Lists { outboxes: outboxes.answer(), waiting: waiting.answer() };
        lists.outboxes.connections.retain(|conn| conn.outbox_bytes > 0);
        *self.lists.borrow_mut() = (lists, Some(now));
    }

    /// Asks the doctor, if that is due. The first report waits for it.
    async fn examine(self: &Rc<Self>) {
        let now = self.shard.now();
        let last = self.examined.replace(Some(now));
        match last {
            Some(at) if now - at < FINDINGS_EVERY => self.examined.set(last),
            Some(_) => {
                let desk = self.clone();
                self.shard.spawn_named("admin doctor", async move { desk.examine_now().await });
            }
            None => self.examine_now().await,
        }
    }

    async fn examine_now(&self) {
        let target = self.settings.target.clone();
        let examine = move || {
            let expected = Workload::default();
            target.running().map(|running| findings(running, &expected)).unwrap_or_default()
        };
        if let Ok(found) = self.doctor.run(&self.shard, examine).await {
            *self.findings.borrow_mut() = found;
        }
    }

    /// Answers one request of a guest.
    pub(super) async fn answer(
        self: Rc<Self>,
        request: Request<Incoming>,
        guests: Rc<Guests>,
        guest: Rc<Guest>,
        peer: Rc<str>,
    ) -> Result<Response<Answer>, Infallible> {
        let is_probe = Route::probe(request.method(), request.uri().path()).is_some();
        let others = guests.asking_from(guest.address());
        let shard = self.shard.clone();
        let asking = guest.asks(is_probe, move || shard.now());
        let answer = match is_probe || others < ASKING_MAX {
            true => self.answered(request, &peer).await,
            false => answer::too_many(format!("{others} requests of this address are being answered")),
        };
        Ok(answer.map(|answer| answer.of(asking)))
    }

    /// Answers a request at the listener for probes.
    pub(super) async fn probed(
        self: Rc<Self>,
        request: Request<Incoming>,
        guest: Rc<Guest>,
    ) -> Result<Response<Answer>, Infallible> {
        let shard = self.shard.clone();
        let asking = guest.asks(true, move || shard.now());
        let answer = self.answered_probe(&request).unwrap_or_else(answer::no_probe);
        Ok(answer.map(|answer| answer.of(asking)))
    }

    /// Answers a probe, whatever name it calls the endpoint by, or none: it tells nothing but how
    /// the server is.
    fn answered_probe(&self, request: &Request<Incoming>) -> Option<Response<Answer>> {
        let method = request.method();
        Some(match Route::probe(method, request.uri().path())? {
            route if method != Method::OPTIONS && !route.allows(method) => {
                answer::other_method(route.methods())
            }
            Route::Health => self.health(),
            _ => self.ready(),
        })
    }

    async fn answered(self: &Rc<Self>, request: Request<Incoming>, peer: &str) -> Response<Answer> {
        if let Some(answer) = self.answered_probe(&request) {
            return answer;
        }
        let gate = &self.settings.gate;
        if let Err(why) = gate.check_name(&request) {
            return answer::refused(&why);
        }
        let Some(route) = Route::find(request.uri().path()) else {
            return self.answered_by_program(request, peer).await;
        };
        if !route.allows(request.method()) {
            return answer::other_method(route.methods());
        }
        let token = match self.let_in(&request, route.has_effect(), route.is_open(), peer) {
            Ok(token) => token,
            Err(refused) => return *refused,
        };
        let who = Who { peer, token };
        let ordered = route.has_effect().then(|| OrderRecord::begin(who, &request));
        let answer = self.carried_out(route, request, who).await;
        if let Some(ordered) = ordered {
            ordered.answered(answer.status());
        }
        answer
    }

    async fn carried_out(
        self: &Rc<Self>,
        route: Route,
        request: Request<Incoming>,
        who: Who<'_>,
    ) -> Response<Answer> {
        match route {
            Route::Page => answer::page(),
            Route::Health => self.health(),
            Route::Ready => self.ready(),
            Route::Report => self.report_json().await,
            Route::Events => match Events::new(&self.press, self.shard.draining()) {
                Some(events) => answer::events(events),
                None => answer::too_many(format!("{LISTENERS_MAX} listen to events, and no more may")),
            },
            Route::LogLevel => self.set_log_level(request.into_body(), who).await,
            Route::Metrics
            | Route::Connections
            | Route::Stalls
            | Route::Doctor
            | Route::Admission
            | Route::ChangeAdmission(_)
            | Route::Drain
            | Route::Close { .. } => {
                let Some(running) = self.running() else {
                    let text = "the server is starting: its factories are pending";
                    return answer::sentence(StatusCode::SERVICE_UNAVAILABLE, text);
                };
                match route {
                    Route::Connections => self.connections(running, request.uri().query()).await,
                    Route::Doctor => self.doctor(request.uri().query()).await,
                    Route::Admission => admission::show(running),
                    Route::ChangeAdmission(order) => {
                        self.change_admission(running, order, request.uri().query()).await
                    }
                    Route::Drain => drain(running),
                    Route::Close { shard, id } => close(running, shard, id),
                    Route::Stalls => stalls(running),
                    _ => self.metrics(running, request.headers()).await,
                }
            }
        }
    }

    /// Health: bad only if a shard is as good as dead, or none is left, since what restarts a
    /// server for it cuts off all connections.
    fn health(&self) -> Response<Answer> {
        let Some(running) = self.running() else { return answer::sentence(StatusCode::OK, "starting") };
        let shards = running.control.remotes().len();
        if !(0..shards).any(|shard| running.runs(shard)) {
            return answer::sentence(StatusCode::SERVICE_UNAVAILABLE, "no shard runs");
        }
        let dead = (0..shards).filter_map(|shard| Some((shard, running.in_turn_for(shard)?)));
        // A shard inside a runtime is in no turn while a task of the runtime blocks its thread.
        let stalls = running.control.stalls();
        let stalled = stalls.iter().filter(|stall| stall.ongoing).map(|stall| (stall.shard, stall.lasted));
        let longest: BTreeMap<usize, Duration> =
            dead.chain(stalled).filter(|(_, time)| *time > DEAD_AFTER).collect();
        let dead: Vec<String> = longest
            .into_iter()
            .map(|(shard, time)| format!("shard {shard} has not gone on for {} s", time.as_secs()))
            .collect();
        match dead.is_empty() {
            true => answer::sentence(StatusCode::OK, "ok"),
            false => answer::sentence(StatusCode::SERVICE_UNAVAILABLE, dead.join("\n")),
        }
    }

    fn ready(&self) -> Response<Answer> {
        match self.running() {
            None => answer::sentence(StatusCode::SERVICE_UNAVAILABLE, "the server is starting"),
            Some(running) if running.control.is_draining() => {
                answer::sentence(StatusCode::SERVICE_UNAVAILABLE, "the server shuts down")
            }
            Some(running) => match running.control.load() {
                load @ (Load::Refusing | Load::Full) => {
                    answer::sentence(StatusCode::SERVICE_UNAVAILABLE, format!("the server's load is {load}"))
                }
                _ => answer::sentence(StatusCode::OK, "ok"),
            },
        }
    }

    async fn report_json(&self) -> Response<Answer> {
        let issue = match self.press.recent(self.shard.now()) {
            Some(issue) => issue,
            None => self.press.issue(self.press.ask()).await,
        };
        answer::whole(StatusCode::OK, JSON, issue.json())
    }

    async fn connections(&self, running: &Running, query: Option<&str>) -> Response<Answer> {
        let query = match parse_query(query) {
            Ok(query) => query,
            Err(text) => return answer::sentence(StatusCode::BAD_REQUEST, text),
        };
        let inspecting = running.control.inspecting(query);
        let _ = self.shard.timeout(CONNECTIONS_WITHIN, inspecting.done()).await;
        let Inspection { connections, mut silent_shards, .. } = inspecting.answer();
        silent_shards.retain(|shard| running.runs(*shard));
        let note =
            silent_shards.iter().map(|shard| format!("shard {shard} does not answer")).collect::<Vec<_>>();
        let connections = connections.iter().map(connection).collect();
        let answer = Connections { connections, silent_shards, note: note.join(", ") };
        answer::json(serde_json::to_vec(&answer))
    }

    async fn doctor(&self, query: Option<&str>) -> Response<Answer> {
        let expected = match parse_expected(query) {
            Ok(expected) => expected,
            Err(text) => return answer::sentence(StatusCode::BAD_REQUEST, text),
        };
        let target = self.settings.target.clone();
        let examine =
            move || target.running().map(|running| findings(running, &expected)).unwrap_or_default();
        let unavailable = |text: String| answer::sentence(StatusCode::SERVICE_UNAVAILABLE, text);
        match self.doctor.run(&self.shard, examine).await {
            Ok(found) => answer::json(serde_json::to_vec(&found)),
            Err(NotDone::Full) => answer::too_many(format!("{DOCTORS_AT_ONCE} ask the doctor already")),
            Err(NotDone::Late) => unavailable(format!(
                "the doctor has no answer within {WITHIN:?}: a file of the machine hangs"
            )),
            Err(NotDone::Panicked(why) | NotDone::NotBegun(why)) => unavailable(why),
        }
    }

    async fn set_log_level(&self, body: Incoming, who: Who<'_>) -> Response<Answer> {
        let Some(log_level) = &self.settings.log_level else {
            let text = "the program gave no way to set the level of its log: the subscriber of tracing has it, so \
                        log by ringserve::log, or give a function by Admin::log_level";
            return answer::sentence(StatusCode::NOT_IMPLEMENTED, text);
        };
        let filter = match read_filter(body).await {
            Ok(filter) => filter,
            Err(text) => return answer::sentence(StatusCode::BAD_REQUEST, text),
        };
        // Before it is set: behind that there may be no line of this level.
        who.sets_the_log(&filter);
        match log_level(&filter) {
            Ok(()) => answer::sentence(StatusCode::OK, format!("the log is set to {filter}")),
            Err(error) => answer::sentence(StatusCode::BAD_REQUEST, error),
        }
    }
}

fn stalls(running: &Running) -> Response<Answer> {
    let stalls: Vec<_> = running.control.stalls().iter().map(stall).collect();
    answer::json(serde_json::to_vec(&stalls))
}

fn drain(running: &Running) -> Response<Answer> {
    running.control.shutdown();
    guarded(|| info!("the server shuts down, as the admin endpoint was told"));
    answer::sentence(StatusCode::ACCEPTED, "the server shuts down")
}

fn close(running: &Running, shard: usize, id: ConnId) -> Response<Answer> {
    match running.control.close_connection(shard, id) {
        true => answer::sentence(
            StatusCode::ACCEPTED,
            "the connection closes after its queued replies, unless it ended before",
        ),
        false => answer::sentence(StatusCode::NOT_FOUND, format!("there is no shard {shard}, or it ended")),
    }
}

/// The workload that `/doctor` is to expect of the server.
///
/// # Errors
/// A sentence with the cause.
fn parse_expected(query: Option<&str>) -> Result<Workload, String> {
    let [expected] = parameters(query, ["for"])?;
    expected.unwrap_or_default().parse()
}

/// The query of `/connections`.
///
/// # Errors
/// A sentence with the cause.
fn parse_query(query: Option<&str>) -> Result<Query, String> {
    let [by, limit] = parameters(query, ["by", "limit"])?;
    let query = match by.as_deref().unwrap_or("outbox") {
        "outbox" => Query::connections().by(By::Outbox),
        "idle" => Query::connections().by(By::Idle),
        "bytes_in" => Query::connections().by(By::BytesIn),
        "age" => Query::connections().by(By::Age),
        "oldest_call" => Query::calls_waiting(),
        other => {
            return Err(format!("by is {other:.40}; it must be outbox, idle, bytes_in, age or oldest_call"));
        }
    };
    let Some(limit) = limit else { return Ok(query) };
    match limit.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit)) {
        Some(limit) => Ok(query.limit(limit)),
        None => Err(format!("limit is {limit:.40}; it must be 1 to {LIMIT_MAX}")),
    }
}

/// Reads a filter: one line of text.
///
/// # Errors
/// A sentence with the cause.
async fn read_filter(body: Incoming) -> Result<String, String> {
    let bytes = match read_body(body, FILTER_BYTES_MAX).await {
        Ok(bytes) => bytes,
        Err(BodyError::TooLarge) => return Err(format!("the filter has more than {FILTER_BYTES_MAX} bytes")),
        Err(BodyError::Broken(error)) => return Err(error),
    };
    let text = String::from_utf8(bytes).map_err(|_| "the filter is no text".to_owned())?;
    match text.trim() {
        "" => Err("the filter is missing: send it as the body, such as info,ringserve=debug".to_owned()),
        filter if filter.contains(char::is_control) => Err("the filter has more than one line".to_owned()),
        filter => Ok(filter.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_of_connections_is_checked() {
        for query in [None, Some(""), Some("by=idle"), Some("by=oldest_call&limit=1"), Some("limit=1000")] {
            assert!(parse_query(query).is_ok(), "{query:?}");
        }
        for (query, words) in [
            ("by=size", "outbox, idle"),
            ("limit=0", "1 to 1000"),
            ("limit=1001", "1 to 1000"),
            ("limit=-1", "1 to 1000"),
            ("limit=", "1 to 1000"),
            ("limit=99999999999999999999", "1 to 1000"),
            ("sort=up", "no parameter"),
        ] {
            let error = parse_query(Some(query)).unwrap_err();
            assert!(error.contains(words) && error.len() < 200, "{query}: {error}");
        }
    }
}
