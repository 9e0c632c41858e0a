//! Calls that wait, in a list for each connection, as the real shard keeps them.

use ringserve_core::Stamp;

use crate::service::Parked;

#[derive(Debug)]
struct Task {
    /// `None` while it runs.
    parked: Option<Parked>,
    /// The shard's count of it, and the next call.
    counted: ringserve_core::ParkOutcome,
    /// Time at which it began to wait, in nanoseconds.
    since: u64,
    prev: Option<u32>,
}

/// Calls that wait, in lists as the shard numbers them.
#[derive(Debug, Default)]
pub struct Tasks {
    slots: Vec<Option<Task>>,
}

impl Tasks {
    /// Room for a call that begins to wait.
    pub fn add(&mut self, parked: Parked) -> u32 {
        let counted = ringserve_core::ParkOutcome::default();
        let task = Some(Task { parked: Some(parked), counted, since: 0, prev: None });
        let free = self.slots.iter().position(Option::is_none);
        match free {
            Some(free) => self.slots[free] = task,
            None => self.slots.push(task),
        }
        free.unwrap_or(self.slots.len() - 1) as u32
    }

    /// Lists a call that begins to wait at `now` before its connection's others, of which
    /// `counted.next` is the first.
    pub fn list(&mut self, task: u32, counted: ringserve_core::ParkOutcome, now: u64) {
        let slot = self.at(task);
        (slot.counted, slot.since) = (counted, now);
        if let Some(next) = counted.next {
            let behind = self.at(next);
            assert_eq!(behind.prev, None, "task {next} is not the first of its connection");
            behind.prev = Some(task);
        }
    }

    fn at(&mut self, task: u32) -> &mut Task {
        let slot = self.slots.get_mut(task as usize).and_then(Option::as_mut);
        slot.unwrap_or_else(|| panic!("task {task} is not there"))
    }

    /// An upper bound of their number.
    pub fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// True if no call waits.
    pub fn is_empty(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    /// A call, if it waits.
    pub fn get(&self, task: u32) -> Option<&Parked> {
        self.slots.get(task as usize)?.as_ref()?.parked.as_ref()
    }

    /// All that wait.
    pub fn iter(&self) -> impl Iterator<Item = &Parked> {
        self.slots.iter().flatten().filter_map(|task| task.parked.as_ref())
    }

    /// Takes a call in order to run it.
    pub fn run(&mut self, task: u32) -> Parked {
        self.at(task).parked.take().expect("a call that runs does not wait")
    }

    /// Makes it wait again.
    pub fn wait(&mut self, task: u32, parked: Parked) {
        self.at(task).parked = Some(parked);
    }

    /// Time at which a call began to wait, in nanoseconds.
    pub fn since(&self, task: u32) -> u64 {
        self.slots[task as usize].as_ref().expect("the call waits").since
    }

    /// Ends a call. Returns the shard's count of it, with the next one, and the time since which
    /// the previous one waits.
    pub fn remove(&mut self, task: u32) -> (ringserve_core::ParkOutcome, Option<Stamp>) {
        let Task { prev, counted, .. } = self.slots[task as usize].take().expect("a call is done once");
        let before = prev.map(|prev| {
            let prev = &mut self.at(prev).counted;
            prev.next = counted.next;
            prev.since
        });
        if let Some(next) = counted.next {
            self.at(next).prev = prev;
        }
        (counted, before)
    }

    /// Drops `first` and all that are listed after it. Returns their names and their calls.
    pub fn cancel(&mut self, first: u32) -> Vec<(u32, Parked)> {
        let mut dropped = Vec::new();
        let mut next = Some(first);
        while let Some(task) = next {
            let slot = self.slots.get_mut(task as usize).and_then(Option::take);
            let slot = slot.unwrap_or_else(|| panic!("task {task} is listed, and is not there"));
            next = slot.counted.next;
            dropped.push((task, slot.parked.expect("no call runs now")));
        }
        dropped
    }
}
