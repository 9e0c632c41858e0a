//! The task that looks at idle connections, and tells what the shard did while no question comes.

use std::rc::Rc;
use std::time::Duration;

use crate::view::{Part, View};

/// The time between two looks.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// Begins the task, which ends when the client is dropped. `look` is called with what the client
/// keeps for each backend.
pub(super) fn begin<P: Part>(view: &Rc<View<P>>, look: impl Fn(&P, u64) + 'static) {
    let (shard, weak) = (view.shard.clone(), Rc::downgrade(view));
    let name = format!("shared connections to {}", view.upstream.name());
    let on = shard.clone();
    on.spawn_named(name, async move {
        let mut ticks = shard.interval(LOOKS_EACH);
        loop {
            ticks.tick().await;
            let Some(view) = weak.upgrade() else { return };
            let now = view.now();
            view.look(now);
            view.tell(now);
            view.members().iter().for_each(|member| look(&member.part, now));
            view.tell_connections();
        }
    });
}
