//! Devices: lines on TCP.
//!
//! `auth TOKEN`, `subscribe TOPIC [CURSOR]`, `unsubscribe TOPIC`, `publish TOPIC JSON`, `quit`.
//! Answers begin with `+` or `-`; messages are `TOPIC CURSOR JSON`, and gaps `TOPIC ! missed COUNT`
//! or `TOPIC ! gap`.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use ringserve::service::{OpenCx, Refusal, Session};
use ringserve::topics::{Since, Slow, Subscriber};
use ringserve::{Cx, Frame, Service};
use serde::de::IgnoredAny;

use crate::hub::{Hub, Seat};
use crate::token::Rights;

/// The service of lines on one shard.
pub struct Devices(pub Rc<Hub>);

/// A device.
pub struct Device {
    topics: Subscriber,
    /// The rights of its token.
    rights: RefCell<Option<Rights>>,
    seat: RefCell<Seat>,
}

impl Session for Device {}

impl Service for Devices {
    type Session = Device;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Device, Refusal> {
        let Devices(hub) = self;
        let topics = hub.topics.subscriber(opening.local_handle(), hub.gateway.lines);
        let rights = hub.gateway.tokens.rights(None).ok();
        let seat = hub.seat(rights.as_ref(), Some(opening.local_handle()));
        Ok(Device { topics, rights: RefCell::new(rights), seat: RefCell::new(seat) })
    }

    async fn call(&self, cx: &Cx<'_, Device>, line: Frame) -> Result<(), Infallible> {
        match self.answer(cx, &String::from_utf8_lossy(&line)).await {
            Ok(said) => cx.reply(format!("+ {said}")),
            Err(why) => cx.reply(format!("- {why}")),
        }
        Ok(())
    }
}

impl Devices {
    async fn answer(&self, cx: &Cx<'_, Device>, line: &str) -> Result<String, String> {
        let (Devices(hub), device) = (self, cx.session());
        let words: Vec<&str> = line.trim_end().splitn(3, ' ').collect();
        if let ["auth", token] = words[..] {
            let rights = hub.gateway.tokens.rights(Some(token))?;
            device.topics.unsubscribe_all();
            device.topics.set_shown(Some(rights.user.clone()));
            let said = rights.user.to_string();
            device.seat.replace(hub.seat(Some(&rights), Some(cx.local_handle())));
            device.rights.replace(Some(rights));
            return Ok(said);
        }
        let may = |is_asked: fn(&Rights, &str) -> bool, topic: &str| {
            let rights = device.rights.borrow();
            let rights = rights.as_ref().ok_or("auth TOKEN comes first")?;
            if is_asked(rights, topic) { Ok(()) } else { Err(format!("not allowed: {topic}")) }
        };
        match words[..] {
            ["subscribe", topic, ref cursor @ ..] => {
                may(Rights::may_subscribe, topic)?;
                let since = match cursor.first() {
                    Some(cursor) => Since::Cursor(cursor.parse().map_err(|_| "no cursor")?),
                    None => Since::Newest,
                };
                let subscribed = device.topics.subscribe(topic, since, Slow::Skip).await;
                let cursor = subscribed.map_err(|error| error.to_string())?;
                Ok(format!("{topic} {cursor}"))
            }
            ["unsubscribe", topic] if device.topics.unsubscribe(topic) => Ok(topic.into()),
            ["unsubscribe", topic] => Err(format!("not subscribed: {topic}")),
            ["publish", topic, data] => {
                may(Rights::may_publish, topic)?;
                serde_json::from_str::<IgnoredAny>(data).map_err(|_| "the data is no JSON")?;
                let published = hub.topics.publish_acked(topic, "", data.to_owned()).await;
                published.map(|()| "published".into()).map_err(|error| error.to_string())
            }
            ["quit"] => {
                cx.close();
                Ok("goodbye".into())
            }
            _ => Err("auth TOKEN, subscribe TOPIC [CURSOR], unsubscribe, publish TOPIC JSON, quit".into()),
        }
    }
}
