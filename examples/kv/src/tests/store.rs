use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::tests::keyer_of;

impl Store {
    /// Panics if the parts disagree.
    pub fn invariants(&self) {
        let ends = self.keys.values().enumerate().filter(|(_, entry)| entry.end != NEVER);
        assert_eq!(self.ends, ends.map(|(at, entry)| (entry.end, at as u32)).collect());
    }
}

/// Gives a key a value, and an end if one is given.
fn put(store: &mut Store, key: &[u8], value: &[u8], end: Option<u64>) {
    let spans = [(0, value.len() as u32)];
    store.put(key, FrameFields::new(value, &spans), 0, end);
}

#[derive(Clone, Debug)]
enum Step {
    Set { key: u8, value: Vec<u8>, ends_in: Option<u64> },
    Remove { key: u8 },
    Find { key: u8 },
    Pass { millis: u64 },
    Clear,
}

fn any_step() -> impl Strategy<Value = Step> {
    let value = prop::collection::vec(any::<u8>(), 0..6);
    prop_oneof![
        10 => (any::<u8>(), value, prop::option::of(1..50u64))
            .prop_map(|(key, value, ends_in)| Step::Set { key, value, ends_in }),
        5 => any::<u8>().prop_map(|key| Step::Remove { key }),
        5 => any::<u8>().prop_map(|key| Step::Find { key }),
        3 => (0..40u64).prop_map(|millis| Step::Pass { millis }),
        1 => Just(Step::Clear),
    ]
}

/// A store, and its clock.
fn store() -> (Store, Rc<Cell<u64>>) {
    let millis = Rc::new(Cell::new(1));
    let clock = millis.clone();
    let (clock, wall) = (millis.clone(), clock);
    let wall = move || Duration::from_millis(wall.get());
    (Store::new(keyer_of(1, 2), move || clock.get(), wall, (0, 8), 100), millis)
}

proptest! {
    #[test]
    fn it_behaves_as_a_map_whose_keys_end(steps in prop::collection::vec(any_step(), 0..300)) {
        let (mut store, millis) = store();
        let mut expected: HashMap<u8, (Vec<u8>, u64)> = HashMap::new();
        for step in steps {
            let now = millis.get();
            expected.retain(|_, (_, end)| *end > now);
            match step {
                Step::Set { key, value, ends_in } => {
                    let end = ends_in.map_or(NEVER, |ends_in| now + ends_in);
                    put(&mut store, &[key], &value, Some(end));
                    expected.insert(key, (value, end));
                }
                Step::Remove { key } => {
                    let at = store.find(&[key]);
                    prop_assert_eq!(at.is_some(), expected.remove(&key).is_some());
                    at.into_iter().for_each(|at| store.remove(at));
                }
                Step::Find { key } => {
                    let at = store.find(&[key]);
                    let found = at.map(|at| (store.value(at).to_vec(), store.end(at)));
                    prop_assert_eq!(found.as_ref(), expected.get(&key));
                }
                Step::Pass { millis: passed } => {
                    millis.set(now + passed);
                    if passed % 2 == 0 {
                        store.expire(3);
                    }
                }
                Step::Clear => {
                    store.clear();
                    expected.clear();
                }
            }
            store.invariants();
        }
        let now = millis.get();
        expected.retain(|_, (_, end)| *end > now);
        let keys: HashSet<u8> = (0..store.len()).filter_map(|at| store.key(at)).map(|key| key[0]).collect();
        prop_assert_eq!(&keys, &expected.into_keys().collect::<HashSet<u8>>());
        while store.expire(2).is_some_and(|end| end <= now) {}
        store.invariants();
        store.expire(usize::MAX);
        prop_assert_eq!(store.len(), keys.len());
    }
}

#[test]
fn keys_with_one_tag_have_one_owner() {
    let (store, _) = store();
    for n in 0..100 {
        let owner_of = |key: String| store.owner(key.as_bytes());
        assert_eq!(owner_of(format!("a{{{n}}}b")), owner_of(format!("{n}")));
        assert_eq!(owner_of(format!("{{}}{n}")), owner_of(format!("{{}}{n}")));
    }
}
