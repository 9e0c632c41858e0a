//! Pages: work that no peer asked for in this turn, behind its calls and replies.
//!
//! A message for 100 000 members, a scan, a replica that catches up: a source with that much to do
//! asks for pages, and gets one at the end of each turn, so that the driver is asked for news in
//! between. Sources take turns, and share the room of a turn.

use super::{Lane, Shard};
use crate::Observer;
use crate::connection::Page;

impl<O: Observer> Shard<O> {
    /// Gives each source that waits its page, first come, first served, as long as the turn has
    /// room: each an equal share of what the ones before it left. One with more to do comes behind
    /// all others, in the next turn.
    #[cold]
    #[inline(never)]
    pub(super) fn give_pages(&mut self, lane: &mut (impl Lane<O> + ?Sized)) {
        let mut left = self.work.page_steps(self.had_more);
        for waiting in (1..=self.shared.pages().len()).rev() {
            // What a page queues would come on top of that.
            if left == 0 || self.holds_off() {
                break;
            }
            let Some(source) = self.shared.pages().take() else { break };
            let mut page = Page::new(left.div_ceil(waiting as u32));
            if lane.page(self, source, &mut page) {
                self.shared.ask_page(source);
            }
            left -= page.taken();
            self.dispatch(lane);
        }
        // The next turn begins at once, and sees how long this one took.
        self.has_pages = !self.shared.pages().is_empty();
        self.begins_aside |= self.has_pages;
    }
}
