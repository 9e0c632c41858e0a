//! Backends that are found by their names, in files, and by sources that fail, lie and change their
//! minds.

use std::fs;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use ringserve::Shard;
use ringserve::testing::Faults;
use ringserve::upstream::{Backends, Balance, Discover, Names};

use super::*;

const NAME: &str = "answers.internal";

fn ips(of: &[usize]) -> Vec<IpAddr> {
    of.iter().map(|index| ADDRS[*index].parse::<SocketAddr>().unwrap().ip()).collect()
}

fn by_name() -> Upstream {
    // Few questions reach each backend.
    let names = Names::new("answers.internal:80").refresh(10 * SECOND);
    Upstream::names("answers", names).balance(Balance::RoundRobin)
}

/// A client that asks twice a second, and counts what was not answered.
fn asks_on(sim: &Sim, name: &str, seconds: u32) -> Rc<Cell<u32>> {
    let failed = Rc::new(Cell::new(0));
    let count = failed.clone();
    let name = name.to_owned();
    sim.client(name.clone(), async move |net| {
        let mut me = net.connect(FRONT).await?;
        for n in 0..seconds * 2 {
            let question = format!("once {name}.{n}");
            if asks(&mut me, &question).await? != question {
                count.set(count.get() + 1);
            }
            net.sleep(SECOND / 2).await;
        }
        Ok(())
    });
    failed
}

#[test]
fn addresses_of_a_name_are_asked_and_followed() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 4);
        sim.name(NAME, ips(&[0, 1]));
        sim.name_takes(NAME, SECOND);
        let upstream = by_name();
        front(sim, &upstream, 1 + sim.seed() as usize % 3);
        // The first question comes before the first answer, and waits for it.
        let failed = asks_on(sim, "c", 60);
        sim.run_for(5 * SECOND);
        assert!(backends[0].asked() > 0 && backends[1].asked() > 0);
        sim.name(NAME, ips(&[3, 1]));
        sim.run_for(15 * SECOND);
        let (left, stays) = (backends[0].asked(), backends[1].asked());
        assert_eq!(backends[0].now.get(), 0, "its connections are closed");
        sim.run_until_done();
        assert_eq!((failed.get(), backends[0].asked(), backends[2].asked()), (0, left, 0));
        assert!(backends[3].asked() > 0 && backends[1].asked() > stays);
        heard_once(&backends);
    });
}

#[test]
fn name_that_is_lost_keeps_its_addresses() {
    Sim::seeds(5).run(|sim| {
        let backends = backends(sim, 2);
        sim.name(NAME, ips(&[0]));
        let upstream = by_name();
        front(sim, &upstream, 2);
        let failed = asks_on(sim, "c", 200);
        sim.run_for(5 * SECOND);
        sim.forget_name(NAME);
        sim.run_for(60 * SECOND);
        assert!(upstream.stats().lookups_failed > 1);
        // An answer without an address says as little.
        sim.name(NAME, []);
        sim.run_for(60 * SECOND);
        assert_eq!(upstream.stats().backends.len(), 1);
        sim.name(NAME, ips(&[1]));
        sim.run_until_done();
        assert_eq!(failed.get(), 0);
        assert!(backends[1].asked() > 0, "it is found in the end");
    });
}

#[test]
fn server_starts_without_an_address_and_finds_one_later() {
    Sim::seeds(5).run(|sim| {
        let backends = backends(sim, 1);
        let upstream = by_name();
        front(sim, &upstream, 1);
        sim.client("early", async move |net| {
            let mut me = net.connect(FRONT).await?;
            net.sleep(SECOND).await;
            let begun = net.now();
            assert_eq!(asks(&mut me, "once 1").await?, "no answer: no backend of the upstream may be asked");
            assert!(net.now() - begun < SECOND, "a name that failed is not waited for");
            Ok(())
        });
        sim.run_until_done();
        sim.name(NAME, ips(&[0]));
        sim.run_for(31 * SECOND);
        let failed = asks_on(sim, "late", 1);
        sim.run_until_done();
        assert_eq!((failed.get(), backends[0].asked()), (0, 2));
    });
}

/// The next step of a source.
#[derive(Clone)]
enum Step {
    Finds(Vec<usize>),
    Fails,
    Ends,
    Panics,
    Waits(Duration),
}

/// A source that follows a script, on whatever shard it runs.
struct Script {
    steps: Mutex<Vec<Step>>,
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Discover for Script {
    async fn run(&self, shard: &Shard, backends: &Backends) -> io::Result<()> {
        let _running = Running::new(&self.now, &self.most);
        loop {
            let step = self.steps.lock().unwrap().pop();
            match step {
                Some(Step::Finds(found)) => backends.set(found.iter().map(|index| ADDRS[*index])),
                Some(Step::Fails) => return Err(io::ErrorKind::ConnectionRefused.into()),
                Some(Step::Ends) => return Ok(()),
                Some(Step::Panics) => panic!("planted: a source panics"),
                Some(Step::Waits(time)) => shard.sleep(time).await,
                None => shard.sleep(1000 * SECOND).await,
            }
        }
    }
}

struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(now: &Arc<AtomicUsize>, most: &AtomicUsize) -> Running {
        most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
        Running(now.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[test]
fn source_is_believed_but_for_too_few_backends() {
    let faults = Faults::harmless();
    Sim::seeds(12).faults(faults).allow_panics(|said| said.contains("planted")).run(|sim| {
        let backends = backends(sim, 4);
        let min = 1 + sim.seed() as usize % 2;
        // The last step is taken first.
        let last: Vec<usize> = vec![0, 2, 3];
        let mut steps = vec![Step::Finds(last.clone())];
        for _ in 0..20 {
            let random = sim.random();
            steps.push(match random % 7 {
                0 => Step::Fails,
                1 => Step::Ends,
                6 => Step::Panics,
                2 => Step::Waits(Duration::from_millis(random >> 8 & 0xfff)),
                _ => Step::Finds((0..4).filter(|index| random >> (8 + index) & 1 == 1).collect()),
            });
        }
        steps.push(Step::Finds(vec![0, 1]));
        let (now, most): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
        let script = Script { steps: Mutex::new(steps), now: now.clone(), most: most.clone() };
        let upstream = Upstream::discover("answers", script).min_backends(min);
        front(sim, &upstream, 3);
        let failed = asks_on(sim, "c", 20);
        let names = || {
            let stats = upstream.stats();
            let names = stats.backends.iter().map(|backend| backend.name.clone());
            let mut names: Vec<String> = names.collect();
            names.sort_unstable();
            names
        };
        for _ in 0..200 {
            sim.run_for(SECOND / 10);
            assert!(names().len() >= min, "an answer that is too small changes nothing");
        }
        sim.run_until_done();
        assert_eq!(failed.get(), 0);
        heard_once(&backends);
        sim.run_for(400 * SECOND);
        assert_eq!(names(), last.iter().map(|index| ADDRS[*index].to_owned()).collect::<Vec<_>>());
        assert_eq!((most.load(SeqCst), now.load(SeqCst)), (1, 1), "one shard runs it");
    });
}

#[test]
fn file_of_backends_is_followed_and_rubbish_in_it_is_not() {
    let path = std::env::temp_dir().join(format!("ringserve-backends-{}", std::process::id()));
    let file = path.clone();
    Sim::seeds(1).run(move |sim| {
        let backends = backends(sim, 3);
        fs::write(&file, "10.0.0.11:80 # the first one\n").unwrap();
        let upstream = Upstream::file("answers", &file);
        front(sim, &upstream, 1);
        let failed = asks_on(sim, "c", 30);
        sim.run_for(3 * SECOND);
        assert!(backends[0].asked() > 0);
        fs::write(&file, "10.0.0.12:80 weight=heavy\n").unwrap();
        sim.run_for(3 * SECOND);
        assert_eq!((backends[1].asked(), upstream.stats().lookups_failed), (0, 1));
        fs::write(&file, "10.0.0.12:80 weight=3\n10.0.0.13:80\n").unwrap();
        sim.run_for(3 * SECOND);
        let asked = backends[0].asked();
        fs::remove_file(&file).unwrap();
        sim.run_until_done();
        assert_eq!((failed.get(), backends[0].asked()), (0, asked));
        assert!(backends[1].asked() > backends[2].asked() && backends[2].asked() > 0);
    });
}
