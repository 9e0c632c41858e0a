//! Orders, and what the program answers: who is let in, what the log has of them, and where they
//! are carried out.

use std::rc::Rc;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{ACCEPT, HeaderMap};
use hyper::{Request, Response, StatusCode};
use ringserve_base::clock::seconds_since_1970;
use ringserve_base::lines::{error, info, warn};
use ringserve_drivers::guarded;

use super::admission::Change;
use super::answer::{self, Answer};
use super::aside::{NotDone, WITHIN};
use super::caller::{BodyError, OrderRecord, Who, order_of, read_body};
use super::desk::Desk;
use super::gate::Gate;
use super::kept::KeptOrders;
use super::program::{AdminRequest, AdminRoute, ProgramPath};
use super::routes::Order;
use super::target::Running;
use crate::metrics::scrape::{Exposition, of_server, scrape};

/// The place of an order that was noted.
enum Kept {
    Written,
    /// One that waits for the disk writes it too.
    Waits,
}

/// Bytes of a request's body at most, for a route of the program.
const BODY_BYTES_MAX: usize = 64 << 10;

impl Desk {
    /// Lets a request in, with the name of its token.
    ///
    /// # Errors
    /// The answer that refuses it. A refused order is logged.
    pub(super) fn let_in<'a>(
        &'a self,
        request: &Request<Incoming>,
        has_effect: bool,
        is_open: bool,
        peer: &str,
    ) -> Result<Option<&'a str>, Box<Response<Answer>>> {
        let gate = &self.settings.gate;
        let token = if is_open { Ok(None) } else { gate.check_caller(request, has_effect) };
        let means = if has_effect { Gate::check_effect(request) } else { Ok(()) };
        token.and_then(|token| means.map(|()| token)).map_err(|why| {
            let refused = answer::refused(&why);
            if has_effect && let Some(left_out) = self.refused.borrow_mut().sample(self.shard.now()) {
                let (order, status) = (order_of(request), refused.status().as_u16());
                guarded(|| info!(peer, status, left_out, "refused order to the admin endpoint: {order}"));
            }
            Box::new(refused)
        })
    }

    /// A path that is none of the endpoint's own.
    pub(super) async fn answered_by_program(
        self: &Rc<Self>,
        request: Request<Incoming>,
        peer: &str,
    ) -> Response<Answer> {
        let routes = &self.settings.program.routes;
        let (route, rest) = match routes.find(request.uri().path(), request.method()) {
            Some(ProgramPath::Route(route, rest)) => (route, rest),
            Some(ProgramPath::OtherMethod(allowed)) => return answer::other_method(allowed),
            None => return answer::no_path(&routes.list()),
        };
        let token = match self.let_in(&request, route.has_effect(), route.is_open(), peer) {
            Ok(token) => token,
            Err(refused) => return *refused,
        };
        let ordered = route.has_effect().then(|| OrderRecord::begin(Who { peer, token }, &request));
        let answer = self.run_route(route, rest, request, token).await;
        if let Some(ordered) = ordered {
            ordered.answered(answer.status());
        }
        answer
    }

    async fn run_route(
        &self,
        route: &AdminRoute,
        rest: usize,
        request: Request<Incoming>,
        token: Option<&str>,
    ) -> Response<Answer> {
        let uri = request.uri().clone();
        let body = match route.has_effect() {
            false => Vec::new(),
            true => match read_body(request.into_body(), BODY_BYTES_MAX).await {
                Ok(body) => body,
                Err(BodyError::TooLarge) => {
                    let text = format!("the body has more than {BODY_BYTES_MAX} bytes");
                    return answer::sentence(StatusCode::PAYLOAD_TOO_LARGE, text);
                }
                Err(BodyError::Broken(error)) => return answer::sentence(StatusCode::BAD_REQUEST, error),
            },
        };
        let request = AdminRequest {
            path: uri.path().to_owned(),
            rest,
            query: uri.query().map(str::to_owned),
            body,
            token: token.map(str::to_owned),
            server: self.running().map(|running| running.control.clone()),
        };
        let (path, running) = (route.path(), route.clone());
        let (aside, which) = match route.is_open() {
            true => (&self.open_routes, "open paths"),
            false => (&self.routes, "paths"),
        };
        let result = aside.run(&self.shard, move || running.answer(&request)).await;
        let (fault, status, text) = match result.map(super::AdminAnswer::parts) {
            Ok(Ok((status, kind, body))) => return answer::of_program(status, kind, body),
            Ok(Err(fault)) => {
                (fault, StatusCode::INTERNAL_SERVER_ERROR, "the answer of this path cannot be sent")
            }
            Err(NotDone::Panicked(message)) => {
                let fault = format!("it panicked: {message}");
                (fault, StatusCode::INTERNAL_SERVER_ERROR, "this path failed, and the log has why")
            }
            Err(NotDone::Late) => {
                let fault = format!("it did not answer within {WITHIN:?}, and goes on");
                (fault, StatusCode::SERVICE_UNAVAILABLE, "this path takes too long")
            }
            Err(NotDone::NotBegun(fault)) => {
                (fault, StatusCode::SERVICE_UNAVAILABLE, "this path cannot be run now")
            }
            Err(NotDone::Full) => {
                return answer::too_many(format!(
                    "as many requests for {which} of the program are being answered as may: {}",
                    aside.max()
                ));
            }
        };
        guarded(|| error!("the path {path} of the program at the admin endpoint: {fault}"));
        answer::sentence(status, text)
    }

    pub(super) async fn metrics(&self, running: &Running, headers: &HeaderMap) -> Response<Answer> {
        let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let format = Exposition::accepted(accepts);
        let collectors = self.settings.program.collectors.clone();
        let all = collectors.len();
        let (of_server, collected) = match all {
            0 => (of_server(&running.control), None),
            _ => {
                let server = running.control.clone();
                let collect = move || {
                    let text = of_server(&server);
                    let collected = collectors.collect(&text);
                    (text, collected)
                };
                match self.scrapes.run(&self.shard, collect).await {
                    Ok((text, collected)) => (text, Some(collected)),
                    Err(why) => {
                        // The figures of the server are wanted most when the program does not
                        // answer.
                        guarded(|| warn!("figures of the program are not in a scrape: {why:?}"));
                        (of_server(&running.control), Some((String::new(), all)))
                    }
                }
            }
        };
        answer::whole(StatusCode::OK, format.content_type(), scrape(of_server, collected, format))
    }

    /// Applies an order on who is let in, and keeps it, if the program wants that.
    pub(super) async fn change_admission(
        &self,
        running: &Running,
        order: Order,
        query: Option<&str>,
    ) -> Response<Answer> {
        let change = Change::parse(running, order, query);
        let done = change.and_then(|change| Ok((change.apply(running)?, change)));
        let (mut done, change) = match done {
            Ok(done) => done,
            Err(why) => return answer::sentence(StatusCode::BAD_REQUEST, why),
        };
        if let Some(kept) = &self.settings.kept {
            match self.keep(kept, &change).await {
                Ok(Kept::Written) => {}
                Ok(Kept::Waits) => done += "; it is written for a restart with the order before it",
                Err(fault) => {
                    guarded(|| {
                        warn!("an order on admission holds, and may be gone after a restart: {fault}")
                    });
                    done = format!("{done}; it may be gone after a restart: {fault}");
                }
            }
        }
        answer::sentence(StatusCode::OK, done)
    }

    /// Keeps an order that was applied.
    ///
    /// # Errors
    /// A sentence that says why it may be gone after a restart.
    async fn keep(&self, kept: &Arc<KeptOrders>, change: &Change) -> Result<Kept, String> {
        kept.note(change, seconds_since_1970())?;
        let file = Arc::clone(kept);
        match self.writes.run_in_place(&self.shard, move |place| file.write(place)).await {
            Ok(written) => written.map(|()| Kept::Written),
            // One of those that write has not begun to: it finds the note.
            Err(NotDone::Full) => Ok(Kept::Waits),
            Err(NotDone::Late) => Err("its disk does not answer yet".to_owned()),
            Err(NotDone::Panicked(why) | NotDone::NotBegun(why)) => Err(why),
        }
    }
}
