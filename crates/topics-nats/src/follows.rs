//! Tasks of topics, and turns at what costs NATS much.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringserve_server::Shard;
use ringserve_server::task::JoinHandle;

/// The tasks that follow topics. They end with this.
#[derive(Default)]
pub(crate) struct Follows {
    all: RefCell<HashMap<Arc<str>, Follow, foldhash::fast::RandomState>>,
}

struct Follow {
    task: JoinHandle<()>,
    bell: Rc<Bell>,
}

/// The means to have a task look at its topic.
#[derive(Default)]
pub(crate) struct Bell {
    has_rung: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

impl Bell {
    /// True once it has rung since the last time. The task is woken by it.
    pub(crate) fn has_rung(&self, task: &Context<'_>) -> bool {
        self.waker.set(Some(task.waker().clone()));
        self.has_rung.take()
    }

    fn ring(&self) {
        self.has_rung.set(true);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Follows {
    /// Has a task follow a topic, in the place of another one. It gets its bell.
    pub(crate) fn begin<F>(&self, shard: &Shard, topic: &Arc<str>, follow: impl FnOnce(Rc<Bell>) -> F)
    where
        F: Future<Output = ()> + 'static,
    {
        let bell = Rc::<Bell>::default();
        let task = shard.spawn_named("topic", follow(bell.clone()));
        let before = self.all.borrow_mut().insert(topic.clone(), Follow { task, bell });
        drop(before);
    }

    pub(crate) fn end(&self, topic: &str) {
        let ended = self.all.borrow_mut().remove(topic);
        drop(ended);
    }

    pub(crate) fn wake_all(&self) {
        self.all.borrow().values().for_each(|follow| follow.bell.wake());
    }

    /// Wakes the task of a topic, to look at it.
    pub(crate) fn ring(&self, topic: &str) {
        if let Some(follow) = self.all.borrow().get(topic) {
            follow.bell.ring();
        }
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A number of turns that are taken at a time.
pub(crate) struct Turns {
    free: Cell<usize>,
    waiting: RefCell<VecDeque<Waker>>,
}

/// A turn, until it is dropped.
pub(crate) struct Turn<'a>(&'a Turns);

impl Turns {
    pub(crate) fn new(count: usize) -> Turns {
        Turns { free: Cell::new(count), waiting: RefCell::default() }
    }

    /// Waits for a turn.
    pub(crate) async fn take(&self) -> Turn<'_> {
        poll_fn(|task| match self.free.get().checked_sub(1) {
            Some(left) => {
                self.free.set(left);
                Poll::Ready(Turn(self))
            }
            None => {
                self.waiting.borrow_mut().push_back(task.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.free.set(self.0.free.get() + 1);
        // One that ended meanwhile takes none, so all are asked: each that finds none waits again.
        let waiting = self.0.waiting.take();
        waiting.into_iter().for_each(Waker::wake);
    }
}
