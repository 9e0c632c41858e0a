//! Messages of a topic for a task, such as the body of an answer by HTTP.

use std::fmt;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;

use crate::form::{Cursor, Form, Gap};
use crate::node::{Node, begin};
use crate::options::{Since, SubscribeError};
use crate::topic::{Feed, Topic};

/// A member of a topic that pulls its messages: a task reads them at its own pace. It costs no
/// queue, since it reads the log; what falls off that meanwhile is a gap. It counts as a member
/// until it is dropped.
pub struct TopicReader {
    node: Rc<Node>,
    topic: u32,
    /// Its own among the topic's feeds.
    number: u32,
    form: u8,
    has_gap: bool,
    /// Gaps of the topic that it reported, or that were before it.
    gaps: u64,
}

impl TopicReader {
    pub(crate) async fn begin(
        node: &Rc<Node>,
        topic: &str,
        form: u8,
        since: Since,
    ) -> Result<TopicReader, SubscribeError> {
        node.take_join()?;
        let pending = node.join(topic).await?;
        node.await_cursor(&pending, topic, since).await?;
        let number = pending.topic;
        let state = &mut *node.state.borrow_mut();
        let topic = state.topics.get_mut(number).ok_or(SubscribeError::Gone)?;
        let ((next, has_gap), gaps) = (begin(topic, since, state.is_numbered), topic.gaps);
        let number_of_feed = topic.feeds.add(Feed::new(next));
        topic.came();
        Ok(TopicReader { node: node.clone(), topic: number, number: number_of_feed, form, has_gap, gaps })
    }

    /// The place of the message that came last.
    pub fn cursor(&self) -> Cursor {
        let state = &mut *self.node.state.borrow_mut();
        let next = |topic: &Topic| topic.feeds.get(self.number).map(|feed| feed.next);
        let found = state.topics.get_mut(self.topic).and_then(|topic| Some((next(topic)?, topic)));
        found.map_or(Cursor { epoch: 0, seq: 0 }, |(next, topic)| topic.cursor_before(next))
    }

    /// Sets the name under which others see this member, as
    /// [`Subscriber::set_shown`](crate::Subscriber::set_shown).
    pub fn set_shown(&self, shown: Option<Arc<str>>) {
        let state = &mut *self.node.state.borrow_mut();
        let topic = state.topics.get_mut(self.topic);
        if let Some(place) = topic.and_then(|topic| topic.feeds.get_mut(self.number)) {
            place.shown = shown;
        }
    }

    /// Waits for the next message, in the [form](Form) of this feed, or for the report of a gap.
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Bytes {
        poll_fn(|task| self.poll_next(task)).await
    }

    /// As [`next`](TopicReader::next), for bodies and streams.
    pub fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Bytes> {
        let by = self.node.shared.forms()[usize::from(self.form)].clone();
        let state = &mut *self.node.state.borrow_mut();
        let Some(topic) = state.topics.get_mut(self.topic) else { return Poll::Pending };
        let name = topic.name.clone();
        self.has_gap |= std::mem::replace(&mut self.gaps, topic.gaps) != topic.gaps;
        if std::mem::take(&mut self.has_gap)
            && let Some(text) = gap(&*by, &name, Gap::Unknown)
        {
            return Poll::Ready(text);
        }
        let Some(feed) = topic.feeds.get_mut(self.number) else { return Poll::Pending };
        let missed = topic.log.first().saturating_sub(feed.next);
        if missed > 0 {
            feed.next += missed;
            topic.moved.skipped += missed;
            if let Some(text) = gap(&*by, &name, Gap::Missed(missed)) {
                return Poll::Ready(text);
            }
        }
        while let Some((stored, _)) = topic.log.get_mut(feed.next) {
            feed.next += 1;
            match stored.entry.made(&name, self.form, &*by) {
                Some(made) => {
                    topic.moved.deliveries += 1;
                    return Poll::Ready(made);
                }
                None => topic.moved.unframed += 1,
            }
        }
        feed.wake_by(task.waker());
        Poll::Pending
    }
}

fn gap(by: &dyn Form, topic: &str, gap: Gap) -> Option<Bytes> {
    let mut text = Vec::new();
    by.gap(topic, gap, &mut text);
    (!text.is_empty()).then(|| text.into())
}

impl Drop for TopicReader {
    fn drop(&mut self) {
        let state = &mut *self.node.state.borrow_mut();
        if let Some(topic) = state.topics.get_mut(self.topic) {
            topic.feeds.remove(self.number);
            topic.left();
        }
    }
}

impl fmt::Debug for TopicReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopicReader").field("cursor", &self.cursor()).finish_non_exhaustive()
    }
}
