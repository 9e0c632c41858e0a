//! Orders on who is let in that outlive the process: a file with a line for each, which is replaced
//! as a whole.
//!
//! ```text
//!   an order ─▶ applied ─▶ noted here ─▶ FILE.new written, synced ─▶ renamed to FILE          the start ─▶ read ─▶ applied again
//! ```

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringserve_admission::internals::TIME_MAX;
use ringserve_admission::{IpList, IpListError};
use ringserve_base::lines::{info, warn};
use ringserve_drivers::guarded;

use super::admission::{Change, LIMITS, What, control_of};
use super::target::Running;

/// The file of 10 000 networks has half a MiB.
const FILE_BYTES_MAX: u64 = 16 << 20;

const HEAD: &str =
    "# Orders on who is let in, kept by the admin endpoint of ringserve. Written by it at each order.\n";

/// An order as it is kept: of one network, or one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Order {
    what: Kept,
    /// `None` for all listeners.
    listener: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kept {
    /// Denied, allowed, or neither again, where an order for all listeners said so; until then, in
    /// seconds since the beginning of 1970.
    Network {
        verb: Verb,
        network: String,
        until: u64,
    },
    Limit {
        name: &'static str,
        value: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Verb {
    Deny,
    Allow,
    Forget,
}

impl Verb {
    fn as_str(self) -> &'static str {
        match self {
            Verb::Deny => "deny",
            Verb::Allow => "allow",
            Verb::Forget => "forget",
        }
    }

    fn find(word: &str) -> Option<Verb> {
        [Verb::Deny, Verb::Allow, Verb::Forget].into_iter().find(|verb| verb.as_str() == word)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            Kept::Network { verb, network, until } => write!(f, "{} {network} until {until}", verb.as_str())?,
            Kept::Limit { name, value } => write!(f, "limit {name} {}", value.as_deref().unwrap_or("off"))?,
        }
        match &self.listener {
            Some(listener) => write!(f, " at {listener}"),
            None => Ok(()),
        }
    }
}

impl Order {
    /// # Errors
    /// A sentence with the cause.
    fn parse(line: &str) -> Result<Order, String> {
        let (rest, listener) = match line.split_once(" at ") {
            Some((rest, listener)) => (rest, Some(listener.trim().to_owned())),
            None => (line, None),
        };
        let words: Vec<&str> = rest.split_ascii_whitespace().collect();
        let what = match words[..] {
            ["limit", name, value] => {
                let known = LIMITS.into_iter().find(|known| *known == name);
                let name = known.ok_or_else(|| format!("there is no limit {name:.40}"))?;
                Kept::Limit { name, value: (value != "off").then(|| value.to_owned()) }
            }
            [verb, network, "until", until] => {
                let verb = Verb::find(verb).ok_or_else(|| format!("{verb:.40} is no order"))?;
                network.parse::<IpList>().map_err(|error| error.to_string())?;
                let until =
                    until.parse().map_err(|_| format!("{until:.40} is no time in seconds since 1970"))?;
                Kept::Network { verb, network: network.to_owned(), until }
            }
            _ => return Err("it is no order, such as `deny 192.0.2.0/24 until 1790000000`".to_owned()),
        };
        Ok(Order { what, listener })
    }

    fn is_over(&self, now: u64) -> bool {
        matches!(self.what, Kept::Network { until, .. } if until <= now)
    }

    /// True if `later` says something else of the same, so that this is kept no more.
    fn gives_way_to(&self, later: &Order) -> bool {
        let is_same = match (&self.what, &later.what) {
            (Kept::Network { network: one, .. }, Kept::Network { network: other, .. }) => one == other,
            (Kept::Limit { name: one, .. }, Kept::Limit { name: other, .. }) => one == other,
            _ => false,
        };
        is_same && (later.listener.is_none() || later.listener == self.listener)
    }
}

/// Orders, oldest first, which are applied in that order.
#[derive(Clone, Debug, Default)]
struct Orders(Vec<Order>);

impl Orders {
    /// # Errors
    /// A sentence with the line and the cause.
    fn parse(text: &str) -> Result<Orders, String> {
        let lines =
            (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
        let each = lines
            .map(|(number, line)| Order::parse(line.trim()).map_err(|why| format!("line {number}: {why}")));
        Ok(Orders(each.collect::<Result<_, _>>()?))
    }

    fn text(&self) -> String {
        let mut text = HEAD.to_owned();
        // A `String` takes everything.
        self.0.iter().for_each(|order| _ = writeln!(text, "{order}"));
        text
    }

    fn note(&mut self, change: &Change, now: u64) {
        self.0.retain(|order| !order.is_over(now));
        for order in self.orders_of(change, now) {
            self.0.retain(|known| !known.gives_way_to(&order));
            // An order to forget that holds everywhere, or revokes one of that listener alone, need
            // not be kept.
            let is_gone = matches!(&order.what, Kept::Network { verb: Verb::Forget, .. })
                && (order.listener.is_none() || order.is_over(now));
            if !is_gone {
                self.0.push(order);
            }
        }
    }

    fn orders_of(&self, change: &Change, now: u64) -> Vec<Order> {
        let listener = change.listener.clone();
        let (verb, networks, until) = match &change.what {
            What::Limit { name, value } => {
                return vec![Order { what: Kept::Limit { name, value: value.clone() }, listener }];
            }
            What::Deny { networks, time } => (Verb::Deny, networks, Some(now + time.as_secs())),
            What::Allow { networks, time } => (Verb::Allow, networks, Some(now + time.as_secs())),
            What::Forget { networks } => (Verb::Forget, networks, None),
        };
        let networks = networks.parse::<IpList>().map(|list| list.names()).unwrap_or_default();
        let each = networks.into_iter().map(|network| {
            // One listener forgets for as long as an order for all would hold.
            let until = until.or_else(|| self.until_of(&network)).unwrap_or(now);
            Order { what: Kept::Network { verb, network, until }, listener: listener.clone() }
        });
        each.collect()
    }

    /// For how long a network is denied or allowed by an order for all listeners.
    fn until_of(&self, of: &str) -> Option<u64> {
        self.0.iter().filter(|order| order.listener.is_none()).find_map(|order| match &order.what {
            Kept::Network { network, until, .. } if network == of => Some(*until),
            _ => None,
        })
    }

    /// As changes that are made now. Each costs as much as all networks that are there, so those of
    /// a verb and a listener are one, but for what is said in between of the same network at other
    /// listeners, which may share its limits.
    fn changes(&self, now: u64) -> Vec<Again> {
        let mut changes: Vec<Again> = Vec::new();
        let (mut open, mut last_of) = (HashMap::new(), HashMap::new());
        for order in self.0.iter().filter(|order| !order.is_over(now)) {
            let listener = order.listener.as_deref();
            let (verb, network, until) = match &order.what {
                Kept::Limit { name, value } => {
                    let (what, listener) =
                        (What::Limit { name, value: value.clone() }, order.listener.clone());
                    changes.push(Again::Limit(Change { what, listener }));
                    continue;
                }
                Kept::Network { verb, network, until } => (*verb, &**network, *until),
            };
            let time = Duration::from_secs(until - now);
            // What cannot be applied spoils no others.
            let can_be = time <= TIME_MAX;
            let last = last_of.get(network).copied();
            let joined = open.get(&(verb, listener)).copied();
            let at = match joined.filter(|at| can_be && last.is_none_or(|last: usize| last <= *at)) {
                Some(at) => at,
                None => {
                    let (networks, listener) = (Vec::new(), order.listener.clone());
                    changes.push(Again::Networks { verb, networks, listener });
                    changes.len() - 1
                }
            };
            if can_be {
                open.insert((verb, listener), at);
            }
            last_of.insert(network, at);
            if let Again::Networks { networks, .. } = &mut changes[at] {
                match networks.last_mut().filter(|(_, known)| *known == time) {
                    Some((list, _)) => *list += &format!(",{network}"),
                    None => networks.push((network.to_owned(), time)),
                }
            }
        }
        changes
    }
}

/// An order that is applied again.
enum Again {
    Limit(Change),
    /// Lists of networks, each with its time.
    Networks {
        verb: Verb,
        networks: Vec<(String, Duration)>,
        listener: Option<String>,
    },
}

impl Again {
    /// # Errors
    /// A sentence with the cause; nothing is changed then.
    fn apply(&self, running: &Running) -> Result<(), String> {
        let (verb, networks, listener) = match self {
            Again::Limit(change) => return change.apply(running).map(|_| ()),
            Again::Networks { verb, networks, listener } => (verb, networks, listener),
        };
        let control = control_of(running, listener.as_deref())?;
        let parsed = networks.iter().map(|(list, time)| Ok((list.parse::<IpList>()?, *time)));
        let lists = parsed.collect::<Result<Vec<_>, IpListError>>().map_err(|error| error.to_string())?;
        let done = match verb {
            Verb::Deny => control.set_timed(&lists, false),
            Verb::Allow => control.set_timed(&lists, true),
            Verb::Forget => lists.iter().try_fold(0, |_, (list, _)| control.forget(list)),
        };
        done.map(|_| ()).map_err(|error| error.to_string())
    }
}

impl fmt::Display for Again {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, networks, listener) = match self {
            Again::Limit(change) => return change.fmt(f),
            Again::Networks { verb, networks, listener } => (verb, networks, listener),
        };
        let lists: Vec<String> = networks.iter().map(|(list, time)| format!("{list} for {time:?}")).collect();
        write!(f, "{} {:.100}", verb.as_str(), lists.join(", "))?;
        match listener {
            Some(listener) => write!(f, " at {listener}"),
            None => Ok(()),
        }
    }
}

/// The file of orders, and what it has.
#[derive(Debug)]
pub(super) struct KeptOrders {
    file: PathBuf,
    orders: Mutex<Orders>,
    /// Held while the file is written.
    writing: Mutex<()>,
}

impl KeptOrders {
    /// Reads the file; without one there are no orders yet.
    ///
    /// # Errors
    /// A sentence with the cause: it cannot be read, is too long, or has a line that is no order,
    /// or there is no directory for it.
    pub(super) fn read(file: PathBuf) -> Result<KeptOrders, String> {
        let shown = file.display().to_string();
        let wrong = |why: String| format!("the kept orders on admission in {shown}: {why}");
        let orders = match ringserve_files::read(&file, FILE_BYTES_MAX + 1) {
            Ok(read) if read.bytes.len() as u64 > FILE_BYTES_MAX => return Err(wrong(too_long())),
            Ok(read) => {
                let text =
                    String::from_utf8(read.bytes).map_err(|_| wrong("the file is no text".to_owned()))?;
                Orders::parse(&text).map_err(|why| {
                    wrong(format!("{why}; mend the line, or remove the file to begin without orders"))
                })?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let folder = folder_of(&file);
                if !folder.is_dir() {
                    return Err(wrong(format!("there is no directory {}", folder.display())));
                }
                Orders::default()
            }
            Err(error) => return Err(wrong(format!("the file cannot be read: {error}"))),
        };
        Ok(KeptOrders { file, orders: Mutex::new(orders), writing: Mutex::default() })
    }

    /// Applies all orders again. One that fails, as since its listener is gone, is reported and
    /// stays in the file.
    pub(super) fn apply(&self, running: &Running, now: u64) {
        let changes = lock(&self.orders).changes(now);
        let count = changes.len();
        let mut failed = 0;
        for change in changes {
            if let Err(why) = change.apply(running) {
                failed += 1;
                guarded(|| warn!("a kept order on admission was not applied again, {change}: {why}"));
            }
        }
        if count > 0 {
            let file = self.file.display();
            guarded(|| {
                info!(
                    "{} of {count} kept orders on admission were applied again, from {file}",
                    count - failed
                )
            });
        }
    }

    /// An order was applied. The file is [written](KeptOrders::write) after it.
    ///
    /// # Errors
    /// The file would be too long; it is not noted then.
    pub(super) fn note(&self, change: &Change, now: u64) -> Result<(), String> {
        let mut orders = lock(&self.orders);
        let mut noted = orders.clone();
        noted.note(change, now);
        if noted.text().len() as u64 > FILE_BYTES_MAX {
            return Err(too_long());
        }
        *orders = noted;
        Ok(())
    }

    /// Writes what was noted until now, in the place of the former file. It waits for the disk. Who
    /// takes a `place` for it finds at most one of those that are taken with a writer that has
    /// begun: the others write what is noted until they have their turn.
    ///
    /// # Errors
    /// A sentence with the cause; the former file is there still.
    pub(super) fn write<P>(&self, place: P) -> Result<(), String> {
        let writing = lock(&self.writing);
        let text = lock(&self.orders).text();
        let written = replace(&self.file, &text);
        drop(place);
        drop(writing);
        written.map_err(|error| format!("{} cannot be written: {error}", self.file.display()))
    }
}

fn too_long() -> String {
    format!("the file has more than {} MiB, which is the most", FILE_BYTES_MAX >> 20)
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a new file beside, and renames it over the old one: a reader finds one of them, whole.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    let mut new = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    new.write_all(text.as_bytes())?;
    new.sync_all()?;
    fs::rename(&beside, file)?;
    File::open(folder_of(file))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(what: What, listener: Option<&str>) -> Change {
        Change { what, listener: listener.map(str::to_owned) }
    }

    fn deny(networks: &str, seconds: u64) -> Change {
        change(What::Deny { networks: networks.to_owned(), time: Duration::from_secs(seconds) }, None)
    }

    fn lines(orders: &Orders) -> Vec<String> {
        orders.0.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn later_order_of_the_same_takes_the_place_of_the_former() {
        let mut orders = Orders::default();
        let limit = |value: &str| What::Limit { name: "per_address", value: Some(value.to_owned()) };
        orders.note(&deny("192.0.2.0/24,10.0.0.1", 100), 1000);
        orders.note(&change(limit("20"), None), 1000);
        orders.note(&change(limit("5"), Some("127.0.0.1:7000")), 1000);
        orders.note(&deny("10.0.0.1", 500), 1050);
        let expected = [
            "deny 192.0.2.0/24 until 1100",
            "limit per_address 20",
            "limit per_address 5 at 127.0.0.1:7000",
            "deny 10.0.0.1/32 until 1550",
        ];
        assert_eq!(lines(&orders), expected);
        // What is set for all holds for each.
        orders.note(&change(What::Limit { name: "per_address", value: None }, None), 1060);
        let allow = What::Allow { networks: "192.0.2.0/24".to_owned(), time: Duration::from_secs(10) };
        orders.note(&change(allow, Some("[::1]:1")), 1060);
        let expected = [
            "deny 192.0.2.0/24 until 1100",
            "deny 10.0.0.1/32 until 1550",
            "limit per_address off",
            "allow 192.0.2.0/24 until 1070 at [::1]:1",
        ];
        assert_eq!(lines(&orders), expected);
        assert_eq!(lines(&Orders::parse(&orders.text()).unwrap()), expected, "it is read as it was written");
        orders.note(&change(What::Limit { name: "accept_rate", value: Some("5/20".to_owned()) }, None), 1600);
        assert_eq!(
            lines(&orders),
            ["limit per_address off", "limit accept_rate 5/20"],
            "what is over is left out"
        );
    }

    #[test]
    fn forgotten_network_stays_away() {
        let mut orders = Orders::default();
        let forget =
            |networks: &str, listener| change(What::Forget { networks: networks.to_owned() }, listener);
        orders.note(&deny("192.0.2.0/24", 100), 1000);
        orders.note(&forget("192.0.2.0/24", Some("a:1")), 1000);
        assert_eq!(lines(&orders), ["deny 192.0.2.0/24 until 1100", "forget 192.0.2.0/24 until 1100 at a:1"]);
        orders.note(&forget("10.0.0.0/8", Some("a:1")), 1000);
        assert_eq!(orders.0.len(), 2, "nothing said so");
        orders.note(
            &change(
                What::Deny { networks: "10.0.0.1".to_owned(), time: Duration::from_secs(9) },
                Some("a:1"),
            ),
            1000,
        );
        orders.note(&forget("10.0.0.1", Some("a:1")), 1000);
        assert_eq!(orders.0.len(), 2, "it was said of that listener alone");
        orders.note(&forget("192.0.2.0/24", None), 1000);
        assert_eq!(lines(&orders), [""; 0]);
    }

    #[test]
    fn orders_are_applied_for_the_rest_of_their_time() {
        let text = "# a\n\ndeny 192.0.2.0/24 until 1100\ndeny 10.0.0.1/32 until 1100\nallow 10.1.0.0/16 until 1100\n\
                    limit address_rate 5/20 at a:1\ndeny 10.0.0.2/32 until 900\ndeny 10.0.0.3/32 until 1007\n";
        assert_eq!(
            shown(text),
            [
                "deny 192.0.2.0/24,10.0.0.1/32 for 100s, 10.0.0.3/32 for 7s",
                "allow 10.1.0.0/16 for 100s",
                "limit address_rate=5/20 at a:1",
            ]
        );
    }

    fn shown(text: &str) -> Vec<String> {
        Orders::parse(text).unwrap().changes(1000).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn many_orders_are_few_changes() {
        let text: String = (0..1000)
            .map(|n| {
                let (verb, until) = (["deny", "allow"][n % 2], 1001 + n);
                format!("{verb} 10.0.{}.{} until {until}{}\n", n / 256, n % 256, ["", " at a:1"][n / 2 % 2])
            })
            .collect();
        assert_eq!(shown(&text).len(), 4);
    }

    #[test]
    fn order_that_others_may_share_keeps_its_place() {
        // What is said last of 10.0.0.1 holds, if a:1 and b:1 share their limits.
        let text = "deny 10.0.0.9 until 1100 at a:1\nallow 10.0.0.1 until 1100 at b:1\ndeny 10.0.0.1 until 1100 at a:1\n\
                    deny 10.0.0.8 until 1100 at a:1\nallow 10.0.0.7 until 1100 at b:1\n";
        assert_eq!(
            shown(text),
            [
                "deny 10.0.0.9 for 100s at a:1",
                "allow 10.0.0.1,10.0.0.7 for 100s at b:1",
                "deny 10.0.0.1,10.0.0.8 for 100s at a:1"
            ]
        );
    }

    #[test]
    fn order_for_too_long_is_alone() {
        let text = "deny 10.0.0.1 until 1100\ndeny 10.0.0.2 until 9000000\ndeny 10.0.0.3 until 1100\n";
        assert_eq!(shown(text), ["deny 10.0.0.1,10.0.0.3 for 100s", "deny 10.0.0.2 for 8999000s"]);
    }

    #[test]
    fn line_that_is_no_order_is_named() {
        for (line, why) in [
            ("open the door", "no order"),
            ("deny 192.0.2.0/24", "no order"),
            ("deny 192.0.2.0/24 until noon", "no time"),
            ("deny 192.0.2.x until 1100", "192.0.2.x"),
            ("welcome 192.0.2.0/24 until 1100", "no order"),
            ("limit moons 3", "no limit moons"),
            ("limit per_address", "no order"),
        ] {
            let error = Orders::parse(&format!("limit per_address off\n{line}\n")).unwrap_err();
            assert!(error.starts_with("line 2: ") && error.contains(why), "{error}");
        }
    }

    #[test]
    fn file_is_replaced_as_a_whole() {
        let folder = std::env::temp_dir().join(format!("ringserve-kept-{}", std::process::id()));
        let file = folder.join("orders");
        assert!(KeptOrders::read(file.clone()).unwrap_err().contains("no directory"));
        fs::create_dir(&folder).unwrap();
        let kept = KeptOrders::read(file.clone()).unwrap();
        kept.note(&deny("192.0.2.0/24", 100), 1000).unwrap();
        kept.write(()).unwrap();
        assert_eq!(
            lines(&lock(&KeptOrders::read(file.clone()).unwrap().orders)),
            ["deny 192.0.2.0/24 until 1100"]
        );
        // The former one stays if the new one cannot be written.
        fs::create_dir(folder.join("orders.new")).unwrap();
        kept.note(&deny("10.0.0.0/8", 100), 1000).unwrap();
        assert!(kept.write(()).unwrap_err().contains("cannot be written"));
        assert_eq!(lock(&KeptOrders::read(file.clone()).unwrap().orders).0.len(), 1);
        // What could not be read again is not noted.
        let long = "x".repeat(FILE_BYTES_MAX as usize);
        let too_long = kept.note(&change(What::Limit { name: "per_address", value: Some(long) }, None), 1000);
        assert!(too_long.unwrap_err().contains("more than 16 MiB") && lock(&kept.orders).0.len() == 2);
        let lines = "# a\n".repeat((FILE_BYTES_MAX / 4 + 1) as usize);
        fs::write(&file, lines + "deny 192.0.2.0/24 until 1100\n").unwrap();
        assert!(KeptOrders::read(file.clone()).unwrap_err().contains("more than 16 MiB"), "it is not cut");
        fs::write(&file, "nonsense\n").unwrap();
        let error = KeptOrders::read(file).unwrap_err();
        assert!(error.contains("line 1") && error.contains("remove the file"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }
}
