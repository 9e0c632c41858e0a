//! A service of topics, on each node of a test.

use std::convert::Infallible;

use ringserve::service::{OpenCx, Refusal, Session};
use ringserve::topics::{self, FormId, ShardTopics, Since, Slow, Subscriber, Topics};
use ringserve::{Cx, Frame, Service, Shard};

/// `+topic since` subscribes, `-topic` ends it, `topic text` publishes, `!topic text` waits until
/// it is kept, `?topic` counts the members on all nodes.
pub struct News {
    topics: ShardTopics,
    form: FormId,
}

pub struct Reader(Subscriber);
impl Session for Reader {}

impl Service for News {
    type Session = Reader;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Reader, Refusal> {
        Ok(Reader(self.topics.subscriber(opening.local_handle(), self.form)))
    }

    async fn call(&self, cx: &Cx<'_, Reader>, line: Frame) -> Result<(), Infallible> {
        let (line, me) = (String::from_utf8_lossy(&line).into_owned(), &cx.session().0);
        let (word, rest) = line.trim_end().split_once(' ').unwrap_or((line.trim_end(), ""));
        let done = |done: Result<(), _>| match done {
            Ok(()) => "ok".to_owned(),
            Err(error) => format!("{error:?}"),
        };
        let said = match (word.split_at(1), rest) {
            (("+", topic), since) => {
                let since = match since {
                    "" => Since::Newest,
                    "retained" => Since::Retained,
                    cursor => Since::Cursor(cursor.parse().unwrap()),
                };
                let subscribed = me.subscribe(topic, since, Slow::Skip).await;
                subscribed.map_or_else(|error| format!("{error:?}"), |cursor| cursor.to_string())
            }
            (("-", topic), _) => me.unsubscribe(topic).to_string(),
            (("!", topic), text) => done(self.topics.publish_acked(topic, "", text.to_owned()).await),
            (("?", topic), _) => format!("{:?}", self.topics.count_on_all_nodes(topic).await.ok()),
            (_, text) => match word.split_once('#') {
                Some((topic, key)) => done(self.topics.publish_keyed(topic, key, text.to_owned())),
                None => done(self.topics.publish(word, text.to_owned())),
            },
        };
        cx.reply(format!("= {said}"));
        Ok(())
    }
}

/// The factory of its services, with these topics.
pub fn factory(topics: &Topics) -> impl Fn(&Shard) -> News + Send + Sync + Clone + 'static {
    let (topics, form) = (topics.clone(), topics.form(topics::Lines));
    move |shard| News { topics: topics.register(shard), form }
}
