//! Work that is done a page at a time, at the end of turns.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;

use ringserve_core::{Page, ShardShared};

use ringserve_base::guard::{Panicked, guard};

/// A source of work that is done a page at a time ([`Shard::pages`](crate::Shard::pages)). Clones
/// are the same source.
#[derive(Clone)]
pub struct Pages {
    sources: Rc<PageSources>,
    number: usize,
}

impl Pages {
    /// Asks for a page at the end of this turn, or of the next one if this turn's pages are over. A
    /// source that waits already waits once. On the shard's thread only; costs no allocation once
    /// as many sources waited before.
    pub fn ask(&self) {
        self.sources.ask(self.number);
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pages").field(&self.number).finish()
    }
}

type Source = Box<dyn FnMut(&mut Page) -> bool>;

/// The sources of a shard.
#[derive(Default)]
pub(crate) struct PageSources {
    /// By number. `None` while it runs, and once the shard has ended.
    sources: RefCell<Vec<Option<Source>>>,
    /// Those that asked before there was a state machine.
    early: RefCell<Vec<usize>>,
    core: OnceCell<Rc<ShardShared>>,
}

impl PageSources {
    pub(crate) fn add(self: &Rc<Self>, source: Source) -> Pages {
        let mut sources = self.sources.borrow_mut();
        sources.push(Some(source));
        if let Some(core) = self.core.get() {
            core.add_page_source();
        }
        Pages { sources: self.clone(), number: sources.len() - 1 }
    }

    fn ask(&self, number: usize) {
        match self.core.get() {
            Some(core) => core.ask_page(number as u32),
            None => self.early.borrow_mut().push(number),
        }
    }

    /// The state machine is there.
    pub(crate) fn begin(&self, core: &Rc<ShardShared>) {
        if self.core.set(core.clone()).is_ok() {
            for _ in self.sources.borrow().iter() {
                core.add_page_source();
            }
            self.early.take().into_iter().for_each(|number| core.ask_page(number as u32));
        }
    }

    /// Gives a source its page. True if it has more to do. One that panicked asks again when it
    /// has.
    pub(crate) fn run(&self, number: u32, page: &mut Page) -> Result<bool, Panicked> {
        let place = number as usize;
        let source = self.sources.borrow_mut().get_mut(place).and_then(Option::take);
        // It is user code, which may add others: nothing is borrowed meanwhile.
        let Some(mut source) = source else { return Ok(false) };
        let has_more = guard(|| source(page));
        if let Some(empty) = self.sources.borrow_mut().get_mut(place) {
            *empty = Some(source);
        }
        has_more
    }

    /// Drops what the sources hold.
    pub(crate) fn clear(&self) {
        for source in self.sources.take() {
            let _ = guard(move || drop(source));
        }
    }
}
