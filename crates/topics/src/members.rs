//! The members of a topic on one shard: a dense table, which is walked a page at a time.

/// A connection as the member of a topic. What it lacks is what its topic has from `next` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// Its place in the table of connections, and the place of this topic in the connection's list.
    pub(crate) connection: u32,
    pub(crate) place: u16,
    /// The policy while it reads slowly: a number of [`Slow`](crate::Slow).
    pub(crate) slow: u8,
    flags: u8,
    /// The number of the next message that it gets.
    pub(crate) next: u64,
}

const _: () = assert!(size_of::<Member>() == 16);

/// It waits for room in the outbox of its connection, or for its turn after that.
const LAGS: u8 = 1;
/// A report is due of messages that were gone before it came.
const OWES_GAP: u8 = 2;

impl Member {
    pub(crate) fn new(connection: u32, place: u16, slow: u8, next: u64) -> Member {
        Member { connection, place, slow, flags: 0, next }
    }

    pub(crate) fn lags(&self) -> bool {
        self.flags & LAGS != 0
    }

    pub(crate) fn owes_gap(&self) -> bool {
        self.flags & OWES_GAP != 0
    }

    pub(crate) fn set_owes_gap(&mut self, owes: bool) {
        self.flags = self.flags & !OWES_GAP | if owes { OWES_GAP } else { 0 };
    }
}

/// The members of a topic, and how far a pass through them has come.
#[derive(Default)]
pub(crate) struct Members {
    all: Vec<Member>,
    /// The place where the pass goes on, and the members to visit from there, around the end.
    walk: usize,
    left: usize,
    lagging: usize,
}

impl Members {
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// The number of members that wait for room.
    pub(crate) fn lagging(&self) -> usize {
        self.lagging
    }

    /// Adds a member. Returns its place.
    pub(crate) fn add(&mut self, member: Member) -> usize {
        self.all.push(member);
        // It may stand before those that the pass visits behind the end.
        self.left += usize::from(self.left > 0);
        self.all.len() - 1
    }

    /// Removes the member at `place`, which the last one takes. Returns that one.
    pub(crate) fn remove(&mut self, place: usize) -> Option<&Member> {
        self.set_lags(place, false);
        let (count, end) = (self.all.len(), self.walk + self.left);
        self.all.swap_remove(place);
        // The pass has yet to visit the last one.
        if self.left > 0 && end >= count {
            let is_ahead = place >= self.walk || place + count < end;
            // It may be behind the pass now, which goes on around the end as far as there.
            self.left = if is_ahead { self.left - 1 } else { self.all.len() - self.walk + place + 1 };
        }
        if self.walk >= self.all.len() {
            self.walk = 0;
        }
        self.all.get(place)
    }

    pub(crate) fn get(&self, place: usize) -> &Member {
        &self.all[place]
    }

    pub(crate) fn get_mut(&mut self, place: usize) -> &mut Member {
        &mut self.all[place]
    }

    pub(crate) fn set_lags(&mut self, place: usize, lags: bool) {
        let member = &mut self.all[place];
        self.lagging = self.lagging + usize::from(lags) - usize::from(member.lags());
        member.flags = member.flags & !LAGS | if lags { LAGS } else { 0 };
    }

    /// All members have a report due.
    pub(crate) fn owe_gap(&mut self) {
        self.all.iter_mut().for_each(|member| member.set_owes_gap(true));
    }

    /// There is something new: the pass visits each member from where it is.
    pub(crate) fn begin_pass(&mut self) {
        self.left = self.all.len();
    }

    /// The place of the member that the pass visits next.
    pub(crate) fn to_visit(&self) -> Option<usize> {
        (self.left > 0).then_some(self.walk)
    }

    /// Counts that member as visited.
    pub(crate) fn visited(&mut self) {
        self.left -= 1;
        self.walk = if self.walk + 1 < self.all.len() { self.walk + 1 } else { 0 };
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Member> {
        self.all.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    fn member(connection: u32) -> Member {
        Member::new(connection, 0, 0, 0)
    }

    proptest! {
        /// Whatever comes and goes meanwhile, a pass visits each member that was there when it
        /// began.
        #[test]
        fn pass_visits_each_member_in_spite_of_changes(steps in prop::collection::vec((0u8..5, any::<u16>()), 1..200)) {
            let (mut members, mut known, mut missing) = (Members::default(), Vec::new(), Vec::new());
            let mut named = 0;
            for (step, at) in steps {
                match step {
                    0 | 1 => {
                        members.add(member(named));
                        known.push(named);
                        named += 1;
                    }
                    2 if !known.is_empty() => {
                        let place = usize::from(at) % known.len();
                        let moved = members.remove(place).map(|moved| moved.connection);
                        let gone = known.swap_remove(place);
                        prop_assert_eq!(moved, known.get(place).copied());
                        missing.retain(|name| *name != gone);
                    }
                    3 => {
                        members.begin_pass();
                        missing = known.clone();
                    }
                    _ => {
                        if let Some(place) = members.to_visit() {
                            let visited = members.get(place).connection;
                            missing.retain(|name| *name != visited);
                            members.visited();
                        }
                    }
                }
            }
            while let Some(place) = members.to_visit() {
                let visited = members.get(place).connection;
                missing.retain(|name| *name != visited);
                members.visited();
            }
            prop_assert!(missing.is_empty(), "{:?} of {:?} were not visited", missing, known);
        }
    }

    #[test]
    fn pass_ends_though_members_leave_all_the_time() {
        let (mut members, mut visits) = (Members::default(), 0);
        for name in 0..1000 {
            members.add(member(name));
        }
        members.begin_pass();
        while members.to_visit().is_some() {
            members.visited();
            visits += 1;
            if visits % 50 == 0 {
                members.remove(visits * 7919 % members.len());
            }
        }
        assert!(visits <= 2000, "{visits} visits of 1000 members");
    }

    #[test]
    fn members_that_lag_are_counted() {
        let mut members = Members::default();
        for name in 0..3 {
            members.add(member(name));
        }
        members.set_lags(0, true);
        members.set_lags(0, true);
        members.set_lags(2, true);
        assert_eq!(members.lagging(), 2);
        members.remove(0);
        assert_eq!((members.lagging(), members.get(0).lags(), members.get(1).lags()), (1, true, false));
        members.set_lags(0, false);
        assert_eq!((members.lagging(), members.len()), (0, 2));
    }
}
