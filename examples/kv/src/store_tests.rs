use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

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

proptest! {
    #[test]
    fn it_behaves_as_a_map_whose_keys_end(steps in prop::collection::vec(any_step(), 0..300)) {
        let keyer = Keyer::default();
        let mut store = Store::default();
        let mut expected: HashMap<u8, (Vec<u8>, u64)> = HashMap::new();
        let mut millis = 1;
        for step in steps {
            let now = Moment::at(millis);
            expected.retain(|_, (_, end)| *end > millis);
            match step {
                Step::Set { key, value, ends_in } => {
                    let end = ends_in.map_or(NEVER, |ends_in| millis + ends_in);
                    let name = [key];
                    match store.find(keyer.key(&name), &now) {
                        Some(at) => {
                            store.replace(at, &value);
                            store.set_end(at, end);
                        }
                        None => store.insert(keyer.key(&name), &value, end, &now),
                    }
                    expected.insert(key, (value, end));
                }
                Step::Remove { key } => {
                    let at = store.find(keyer.key(&[key]), &now);
                    prop_assert_eq!(at.is_some(), expected.remove(&key).is_some());
                    at.into_iter().for_each(|at| store.remove(at));
                }
                Step::Find { key } => {
                    let at = store.find(keyer.key(&[key]), &now);
                    let found = at.map(|at| (store.value(at).to_vec(), store.end(at)));
                    prop_assert_eq!(found.as_ref(), expected.get(&key));
                }
                Step::Pass { millis: passed } => millis += passed,
                Step::Clear => {
                    store.clear();
                    expected.clear();
                }
            }
            store.invariants();
        }
        let now = Moment::at(millis);
        expected.retain(|_, (_, end)| *end > millis);
        let keys: HashSet<u8> = store.keys(&now).map(|key| key[0]).collect();
        prop_assert_eq!(keys, expected.into_keys().collect::<HashSet<u8>>());
    }

    #[test]
    fn a_scan_sees_every_key_that_stays(
        size in 0..60u8,
        removed in prop::collection::vec((0..60u8, 0..20usize), 0..40),
        added in prop::collection::vec((100..200u8, 0..20usize), 0..40),
        count in 1..10usize,
    ) {
        let keyer = Keyer::default();
        let now = Moment::at(0);
        let mut store = Store::default();
        for key in 0..size {
            store.insert(keyer.key(&[key]), b"", NEVER, &now);
        }
        let (mut seen, mut cursor) = (HashSet::new(), 0);
        for round in 0.. {
            let (next, keys) = store.scan(cursor, count, &now);
            seen.extend(keys.map(|key| key[0]));
            cursor = next;
            if cursor == 0 {
                break;
            }
            for (key, _) in removed.iter().filter(|(_, when)| *when == round) {
                if let Some(at) = store.find(keyer.key(&[*key]), &now) {
                    store.remove(at);
                }
            }
            for (key, _) in added.iter().filter(|(_, when)| *when == round) {
                if store.find(keyer.key(&[*key]), &now).is_none() {
                    store.insert(keyer.key(&[*key]), b"", NEVER, &now);
                }
            }
            prop_assert!(round < 1000, "the scan does not end");
        }
        for key in (0..size).filter(|key| removed.iter().all(|(gone, _)| gone != key)) {
            prop_assert!(seen.contains(&key), "{} was not seen", key);
        }
    }

    #[test]
    fn every_key_has_an_owner_and_all_shards_own_some(shards in 1..9usize) {
        let keyer = Keyer::default();
        let owners: HashSet<usize> =
            (0..2000u32).map(|key| keyer.key(&key.to_le_bytes()).owner(shards)).collect();
        prop_assert_eq!(owners, (0..shards).collect::<HashSet<usize>>());
    }
}

#[test]
fn keys_that_are_over_do_not_pile_up_while_others_come() {
    let keyer = Keyer::default();
    let mut store = Store::default();
    for n in 0..100_000u64 {
        store.insert(keyer.key(&n.to_le_bytes()), b"value", n + 1000, &Moment::at(n));
    }
    assert!(store.len() < 2000, "{} keys, of which 1000 live", store.len());
    assert_eq!(store.expired() as usize + store.len(), 100_000);
    store.invariants();
}

#[test]
fn a_value_that_shrank_gives_memory_back() {
    let keyer = Keyer::default();
    let mut store = Store::default();
    let now = Moment::at(0);
    store.insert(keyer.key(b"key"), &[0; 100_000], NEVER, &now);
    let at = store.find(keyer.key(b"key"), &now).unwrap();
    store.replace(at, &[0; 30_000]);
    assert!(store.value_mut(at).capacity() >= 100_000, "most of it may be wanted again");
    store.replace(at, &[0; 3]);
    assert_eq!(store.value_mut(at).capacity(), 3);
}
