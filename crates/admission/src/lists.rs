//! Lists of networks, from text and from files that are read again when they change.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use ringserve_files::{Content, Watcher};

use super::ranges::{Ranges, range};

/// Bytes of a file at most: more than a million networks.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Characters of a wrong entry that an error shows.
const SHOWN: usize = 60;

/// Networks whose addresses are denied or allowed ([`Admission::deny`], [`Admission::allow`]):
/// addresses (`192.0.2.7`) and networks (`10.0.0.0/8`, `2001:db8::/32`). Bits after the prefix do
/// not matter. A network of IPv4 addresses holds for peers of `[::]`, too, and may be written as
/// one of IPv6 (`::ffff:192.0.2.0/120`).
///
/// A look into a list takes about as long whatever networks it has. One of IPv4 takes 14 bytes, and
/// one of IPv6 52.
///
/// ```
/// # mod ringserve {
/// #     pub use ringserve_admission as admission;
/// # }
/// use ringserve::admission::{Admission, IpList};
///
/// # fn main() -> Result<(), ringserve_admission::IpListError> {
/// let office: IpList = "192.0.2.0/24, 2001:db8:1::/48".parse()?;
/// let admission = Admission::default().deny(IpList::file("/etc/app/deny.txt")).allow(office);
/// # let _ = admission;
/// # Ok(())
/// # }
/// ```
///
/// [`Admission::deny`]: crate::Admission::deny
/// [`Admission::allow`]: crate::Admission::allow
#[derive(Clone)]
pub struct IpList {
    shared: Arc<Shared>,
}

struct Shared {
    file: Option<PathBuf>,
    /// Knows how the file was when it was read.
    watcher: Mutex<Watcher>,
    networks: ArcSwap<Networks>,
}

impl IpList {
    /// A list in a file: a network or an address in each line, and comments after `#` or `;`. It
    /// is read when the server starts, which fails if it cannot be read, and again within a second
    /// after it changed, as its times or its size tell. A file with a wrong line then keeps the old
    /// list in use, with an error in the log that names the line. So does one that cannot be read,
    /// with one error, and each second tries again. Replace the file by renaming a new one over it:
    /// the half of a file that is written in place may be a list as well.
    ///
    /// A file may have 64 MiB. In a simulation it is read at the start alone.
    pub fn file(file: impl Into<PathBuf>) -> IpList {
        IpList::with(Some(file.into()), Networks::default())
    }

    fn with(file: Option<PathBuf>, networks: Networks) -> IpList {
        IpList {
            shared: Arc::new(Shared {
                file,
                watcher: Mutex::default(),
                networks: ArcSwap::from_pointee(networks),
            }),
        }
    }

    /// True for an address of the list.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.shared.networks.load().contains(address)
    }

    /// The number of its networks, each counted once.
    pub fn len(&self) -> usize {
        self.shared.networks.load().len()
    }

    /// True if it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the file, if it is one that was not read since it changed; at the start in any case,
    /// since another start may have failed by it, or another list have taken it. True if the list
    /// may be another one now.
    ///
    /// # Errors
    /// If it has a wrong line, or is refused by `check`: the list stays as it is, and is not read
    /// again before the file changes. Or if it cannot be read: then it is tried again by the next
    /// call, which fails for another reason alone.
    pub(super) fn refresh(
        &self,
        at_start: bool,
        check: impl FnOnce(&Networks) -> Result<(), String>,
    ) -> Result<bool, IpListError> {
        let Some(file) = &self.shared.file else {
            let checked = check(&self.shared.networks.load());
            return checked.map(|()| false).map_err(|why| IpListError { file: None, line: None, why });
        };
        let mut watcher = self.shared.watcher.lock().unwrap_or_else(PoisonError::into_inner);
        if at_start {
            *watcher = Watcher::default();
        }
        let wrong = |(line, why)| IpListError { file: Some(file.clone()), line, why };
        let read = || read(file).map(|read| (read.bytes, vec![read.stamp])).map_err(|why| wrong((None, why)));
        let judge = |bytes| {
            let networks = Networks::of(bytes).map_err(wrong)?;
            check(&networks).map_err(|why| wrong((None, why)))?;
            self.shared.networks.store(Arc::new(networks));
            Ok(true)
        };
        watcher.look(&[file], read, judge).unwrap_or(Ok(false))
    }

    /// The networks that it has now.
    pub(super) fn networks(&self) -> Arc<Networks> {
        self.shared.networks.load_full()
    }

    /// Its networks; of one that is a file those that are in the file now, for lists that are not
    /// read at a start. The list stays as it is.
    ///
    /// # Errors
    /// If it cannot be read, or has a wrong line.
    pub(super) fn read_networks(&self) -> Result<Arc<Networks>, IpListError> {
        let Some(file) = &self.shared.file else { return Ok(self.networks()) };
        let read = read(file).map_err(|why| (None, why)).and_then(|read| Networks::of(read.bytes));
        read.map(Arc::new).map_err(|(line, why)| IpListError { file: Some(file.clone()), line, why })
    }

    /// The networks that it has now, as texts.
    #[doc(hidden)]
    pub fn names(&self) -> Vec<String> {
        self.networks().iter().map(|network| network.to_string()).collect()
    }

    /// The file from which it is read.
    pub(super) fn path(&self) -> Option<&Path> {
        self.shared.file.as_deref()
    }
}

fn read(file: &Path) -> Result<Content, String> {
    ringserve_files::read(file, FILE_BYTES_MAX + 1).map_err(|error| format!("it cannot be read: {error}"))
}

/// Networks and addresses, one in each line, or between commas and spaces.
impl FromStr for IpList {
    type Err = IpListError;

    fn from_str(text: &str) -> Result<IpList, IpListError> {
        let networks =
            Networks::parse(text).map_err(|(line, why)| IpListError { file: None, line: Some(line), why })?;
        Ok(IpList::with(None, networks))
    }
}

impl fmt::Debug for IpList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.shared.file {
            Some(file) => write!(f, "IpList({}, {} networks)", file.display(), self.len()),
            None => write!(f, "IpList({} networks)", self.len()),
        }
    }
}

/// The reason why a list cannot be used. The text names the file and the line.
#[derive(Clone, PartialEq, Eq)]
pub struct IpListError {
    file: Option<PathBuf>,
    line: Option<usize>,
    why: String,
}

impl IpListError {
    /// The file of the list; `None` if it was given as text.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The wrong line, counted from 1; `None` if it is not a single one.
    pub fn line(&self) -> Option<usize> {
        self.line
    }
}

impl fmt::Display for IpListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let IpListError { file, line, why } = self;
        match (file, line) {
            (Some(file), Some(line)) => write!(f, "{}, line {line}: {why}", file.display()),
            (Some(file), None) => write!(f, "{}: {why}", file.display()),
            (None, Some(line)) => write!(f, "line {line} of the list: {why}"),
            (None, None) => write!(f, "the list: {why}"),
        }
    }
}

ringserve_buf::debug_is_display!(IpListError);

impl std::error::Error for IpListError {}

/// The networks of a list.
#[derive(Default)]
pub(super) struct Networks {
    /// In their order, each once.
    v4: Box<[Ipv4Net]>,
    v6: Box<[Ipv6Net]>,
    /// The addresses of those networks.
    v4_ranges: Ranges<u32>,
    v6_ranges: Ranges<u128>,
    /// Everything, of which it was said once alone.
    all_once: Option<IpNet>,
}

/// Each once, in their order.
fn sorted<T: Ord>(mut networks: Vec<T>) -> Box<[T]> {
    networks.sort_unstable();
    networks.dedup();
    networks.into()
}

impl Networks {
    /// Those of a file.
    ///
    /// # Errors
    /// The number of the first wrong line, and what is wrong with it; or with the whole.
    fn of(bytes: Vec<u8>) -> Result<Networks, (Option<usize>, String)> {
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err((None, format!("it has more than {} MiB, which is the most", FILE_BYTES_MAX >> 20)));
        }
        let text =
            String::from_utf8(bytes).map_err(|_| (None, "it cannot be read: it is no UTF-8".to_owned()))?;
        Networks::parse(&text).map_err(|(line, why)| (Some(line), why))
    }

    /// # Errors
    /// The number of the first wrong line, and what is wrong with it.
    fn parse(text: &str) -> Result<Networks, (usize, String)> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        let mut everything: [Vec<IpNet>; 2] = Default::default();
        for (number, line) in text.lines().enumerate() {
            let entries = line.split(['#', ';']).next().unwrap_or_default();
            for entry in entries.split([' ', '\t', ',', '\r']).filter(|entry| !entry.is_empty()) {
                let network = network(entry).ok_or_else(|| {
                    let shown: String = entry.chars().take(SHOWN).collect();
                    let why = format!(
                        "{shown:?} is neither an address nor a network; write ADDRESS or ADDRESS/BITS"
                    );
                    (number + 1, why)
                })?;
                if network.prefix_len() == 0 {
                    everything[usize::from(network.addr().is_ipv6())].push(network);
                }
                match network {
                    IpNet::V4(network) => v4.push(network),
                    IpNet::V6(network) => v6.push(network),
                }
            }
        }
        let once = everything.iter().find(|said| said.len() == 1);
        let (v4, v6) = (sorted(v4), sorted(v6));
        Ok(Networks {
            v4_ranges: Ranges::new(v4.iter().map(|network| range(&IpNet::V4(*network)))),
            v6_ranges: Ranges::new(v6.iter().map(|network| range(&IpNet::V6(*network)))),
            all_once: once.and_then(|said| said.first().copied()),
            v4,
            v6,
        })
    }

    fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = IpNet> + '_ {
        let v4 = self.v4.iter().copied().map(IpNet::V4);
        v4.chain(self.v6.iter().copied().map(IpNet::V6))
    }

    #[inline]
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        match address.to_canonical() {
            IpAddr::V4(address) => self.v4_ranges.contains(address.into()),
            IpAddr::V6(address) => self.v6_ranges.contains(address.into()),
        }
    }

    /// True if it can deny connections.
    ///
    /// # Errors
    /// If it would deny all of them, and that is said only once.
    pub(super) fn check_denied(&self) -> Result<(), String> {
        match self.all_once {
            None => Ok(()),
            Some(network) => Err(format!(
                "{network} denies every peer of its family; write it twice if that is meant, or else remove it"
            )),
        }
    }
}

/// An address, or a network, which is one of IPv4 where it is inside `::ffff:0:0/96`. Bits behind
/// the prefix are zeros.
pub fn network(text: &str) -> Option<IpNet> {
    let network = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
    let mapped = |network: Ipv6Net| {
        let bits = network.prefix_len().checked_sub(96)?;
        Ipv4Net::new(network.addr().to_ipv4_mapped()?, bits).ok()
    };
    Some(match network {
        IpNet::V6(v6) => mapped(v6).map_or(network, IpNet::V4).trunc(),
        IpNet::V4(_) => network.trunc(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn list(text: &str) -> IpList {
        text.parse().unwrap()
    }

    fn has(list: &IpList, address: &str) -> bool {
        list.contains(address.parse().unwrap())
    }

    fn unchecked(_: &Networks) -> Result<(), String> {
        Ok(())
    }

    /// A file that is removed at the end.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str, text: &str) -> Temporary {
            let file = std::env::temp_dir().join(format!("ringserve-{name}-{}.txt", std::process::id()));
            let temporary = Temporary(file);
            temporary.write(text);
            temporary
        }

        /// By a rename, so that it is another file even where the clock of the file system did not
        /// move.
        fn write(&self, text: &str) {
            let new = self.0.with_extension("new");
            fs::write(&new, text).unwrap();
            fs::rename(new, &self.0).unwrap();
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn networks_of_both_families_are_found() {
        let list = list(
            "10.0.0.0/8, 192.0.2.7 2001:db8::/32\n# 1.2.3.4\n fd00::1 ; the printer\r\n\n::ffff:198.51.100.0/120",
        );
        assert_eq!(list.len(), 5);
        for (address, is_in) in [
            ("10.255.0.1", true),
            ("11.0.0.0", false),
            ("::ffff:10.1.2.3", true),
            ("192.0.2.7", true),
            ("192.0.2.8", false),
            ("1.2.3.4", false),
            ("2001:db8:ffff::1", true),
            ("2001:db9::", false),
            ("fd00::1", true),
            ("fd00::2", false),
            ("198.51.100.9", true),
            ("::ffff:198.51.100.9", true),
            ("198.51.101.9", false),
            ("::1", false),
        ] {
            assert_eq!(has(&list, address), is_in, "{address}");
        }
        assert!(IpList::file("/nonexistent").is_empty());
    }

    #[test]
    fn wrong_entries_are_named_with_their_line() {
        for (text, line, shown) in [
            ("10.0.0.0/33", 1, "10.0.0.0/33"),
            ("10.0.0.1\n\n# x\nlocalhost", 4, "localhost"),
            ("10.0.0.0/8\n10.0.0/8", 2, "10.0.0/8"),
            ("2001:db8::/129", 1, "2001:db8::/129"),
            ("10.0.0.1 and 10.0.0.2", 1, "and"),
        ] {
            let error = text.parse::<IpList>().unwrap_err();
            let why = format!("{shown:?} is neither an address nor a network; write ADDRESS or ADDRESS/BITS");
            assert_eq!(error.to_string(), format!("line {line} of the list: {why}"));
            assert_eq!((error.line(), error.file()), (Some(line), None));
        }
        let long = "x".repeat(1 << 20).parse::<IpList>().unwrap_err().to_string();
        assert!(long.len() < 200, "{long}");
    }

    #[test]
    fn everything_is_denied_only_if_it_is_said_twice() {
        let denied =
            |text: &str| list(text).refresh(false, Networks::check_denied).map_err(|error| error.to_string());
        assert!(denied("10.0.0.0/8\n0.0.0.0/0").unwrap_err().contains("0.0.0.0/0 denies every peer"));
        assert!(denied("::/0").unwrap_err().contains("::/0 denies every peer"));
        assert!(denied("10.0.0.0/0").is_err(), "the bits behind the prefix do not matter");
        assert!(denied("::ffff:0.0.0.0/96").is_err(), "all of IPv4, as IPv6 writes it");
        assert!(denied("0.0.0.0/0\n::/0\n0.0.0.0/0").is_err(), "that one is said once");
        assert_eq!(denied("0.0.0.0/0 0.0.0.0/0"), Ok(false));
        assert_eq!(denied("0.0.0.0/1 128.0.0.0/1"), Ok(false));
    }

    #[test]
    fn changed_file_is_read_again() {
        let file = Temporary::new("changed", "10.0.0.0/8\n");
        let list = IpList::file(&file.0);
        assert!(!has(&list, "10.0.0.1"), "it is read at the start");
        assert_eq!(list.refresh(false, unchecked), Ok(true));
        assert_eq!(list.refresh(false, unchecked), Ok(false));
        let same = list.clone();
        file.write("11.0.0.0/8");
        assert_eq!(list.refresh(false, unchecked), Ok(true));
        assert!(has(&same, "11.0.0.1") && !has(&same, "10.0.0.1"));
    }

    #[test]
    fn file_with_rubbish_keeps_the_old_list_and_is_named() {
        let file = Temporary::new("rubbish", "10.0.0.0/8");
        let list = IpList::file(&file.0);
        list.refresh(false, Networks::check_denied).unwrap();
        let refused = |text: &str| {
            file.write(text);
            let error = list.refresh(false, Networks::check_denied).unwrap_err();
            let is_old = has(&list, "10.0.0.1") && !has(&list, "11.0.0.1") && list.len() == 1;
            assert!(is_old, "the old list stays");
            assert_eq!(list.refresh(false, Networks::check_denied), Ok(false), "it is said once");
            assert!(list.refresh(true, Networks::check_denied).is_err(), "another start fails too");
            assert_eq!(error.file(), Some(&*file.0));
            error
        };
        let rubbish = refused(&format!("{}\u{0}\u{1}binary", "11.0.0.0/8\n".repeat(16)));
        let place = format!("{}, line 17: ", file.0.display());
        assert!(rubbish.to_string().starts_with(&place), "{rubbish}");
        assert!(refused("0.0.0.0/0").to_string().contains("denies every peer"));
        file.write("");
        fs::write(&file.0, [0xff, 0xfe]).unwrap();
        assert!(list.refresh(false, unchecked).unwrap_err().to_string().contains("cannot be read"));
        fs::remove_file(&file.0).unwrap();
        let gone = list.refresh(false, unchecked).unwrap_err().to_string();
        assert!(gone.contains("it cannot be read: No such file"), "{gone}");
        assert_eq!(list.refresh(false, unchecked), Ok(false), "it is said once");
        assert!(has(&list, "10.0.0.1"));
        file.write("12.0.0.0/8");
        assert_eq!(list.refresh(false, unchecked), Ok(true));
        assert!(has(&list, "12.0.0.1"));
    }

    /// An address, or its network: many lie beside each other, or in each other.
    fn network_of_any() -> impl Strategy<Value = IpNet> {
        let v4 = (any::<u32>(), 1..=32u8)
            .prop_map(|(bits, len)| Ipv4Net::new((bits & 0x8f0f_03ff).into(), len).unwrap().trunc().into());
        let v6 = (any::<u128>(), 1..=128u8).prop_map(|(bits, len)| {
            // None of them is all of IPv4 too.
            let bits = bits & 0x8003_0000_0003_0000_0003_8000_0000_0007 | 1 << 127;
            Ipv6Net::new(bits.into(), len).unwrap().trunc().into()
        });
        prop_oneof![v4, v6]
    }

    proptest! {
        #[test]
        fn list_finds_what_a_search_finds(
            networks in prop::collection::vec(network_of_any(), 0..100),
            others in prop::collection::vec(network_of_any(), 1..50),
            twice in 0..3usize,
        ) {
            let said = networks.iter().chain(&networks[..twice.min(networks.len())]);
            let list = list(&said.map(|network| format!("{network}\n")).collect::<String>());
            let mut each = networks.clone();
            each.sort_unstable();
            each.dedup();
            prop_assert_eq!(list.len(), each.len());
            prop_assert_eq!(list.networks().iter().collect::<Vec<_>>(), each);
            let ends = |network: &IpNet| [network.network(), network.broadcast()];
            for address in networks.iter().chain(&others).flat_map(ends) {
                let is_in = networks.iter().any(|network| network.contains(&address));
                prop_assert_eq!(list.contains(address), is_in, "{}", address);
                if let IpAddr::V4(address) = address {
                    prop_assert_eq!(list.contains(address.to_ipv6_mapped().into()), is_in, "{}", address);
                }
            }
        }
    }
}
