//! Names and addresses: what of the network belongs to which state directory and slot.

use std::{fs, io, net::Ipv4Addr, path::Path};

use sha2::{Digest, Sha256};

use super::netlink::Mac;

/// Slots of a node; see "uid ranges" in `docs/reference/protocols.md`.
const SLOTS: u32 = 16_384;
/// A state directory owns one /17: its gateway and an address for every slot.
pub const PREFIX: u8 = 17;
const RANGE: u32 = 1 << (32 - PREFIX as u32);

/// What names the interfaces and the rules of one state directory, also for the noded that comes after a crash.
#[derive(Debug, Clone)]
pub struct Names {
    /// Seven hexadecimal digits of the state directory's hash.
    hash: String,
}

impl Names {
    pub fn of(state_dir: &Path) -> Self {
        let digest = Sha256::digest(state_dir.as_os_str().as_encoded_bytes());
        let hash = format!("{:02x}{:02x}{:02x}{:02x}", digest[0], digest[1], digest[2], digest[3]);
        Self { hash: hash[..7].to_owned() }
    }

    /// What all interfaces of this state directory begin with.
    pub fn prefix(&self) -> String {
        format!("sm{}", self.hash)
    }

    /// The interface that carries the gateway's address.
    pub fn gateway(&self) -> String {
        format!("sm{}gw", self.hash)
    }

    /// The idle other end of that interface.
    pub fn gateway_peer(&self) -> String {
        format!("sm{}gx", self.hash)
    }

    pub fn host_end(&self, slot: u32) -> String {
        format!("sm{}{slot:04x}", self.hash)
    }

    /// The slot whose interface this is.
    pub fn slot(&self, interface: &str) -> Option<u32> {
        let digits = interface.strip_prefix(&self.prefix())?;
        u32::from_str_radix(digits, 16).ok().filter(|slot| digits.len() == 4 && *slot < SLOTS)
    }

    pub fn table(&self) -> String {
        format!("sandmill_{}", self.hash)
    }

    /// Where the search for a free range starts.
    fn seed(&self) -> u32 {
        u32::from_str_radix(&self.hash, 16).unwrap_or_default()
    }
}

/// Whether this is the gateway's interface of any state directory.
pub fn is_a_gateway(interface: &str) -> bool {
    interface.len() == 11 && interface.starts_with("sm") && interface.ends_with("gw")
}

/// The addresses of one state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    base: u32,
}

impl Range {
    pub fn new(base: Ipv4Addr) -> Option<Self> {
        let base = u32::from(base);
        (base.is_multiple_of(RANGE)).then_some(Self { base })
    }

    pub fn base(self) -> Ipv4Addr {
        self.base.into()
    }

    pub fn gateway(self) -> Ipv4Addr {
        (self.base + 1).into()
    }

    pub fn sandbox(self, slot: u32) -> Option<Ipv4Addr> {
        (slot < SLOTS).then(|| (self.base + 2 + slot).into())
    }

    pub fn contains(self, address: Ipv4Addr) -> bool {
        u32::from(address) & !(RANGE - 1) == self.base
    }

    fn overlaps(self, network: (u32, u32)) -> bool {
        let (address, mask) = network;
        // The default route covers everything and collides with nothing.
        mask != 0 && (self.base & mask == address & mask || address & !(RANGE - 1) == self.base)
    }

    /// The first range of 10.64.0.0/10 that no route and no resolver of the host lies in.
    pub fn choose(names: &Names, taken: &[(u32, u32)]) -> Option<Self> {
        const FIRST: u32 = 10 << 24 | 64 << 16;
        const RANGES: u32 = (1 << 22) / RANGE;
        (0..RANGES)
            .map(|step| Self { base: FIRST + (names.seed().wrapping_add(step) % RANGES) * RANGE })
            .find(|range| !taken.iter().any(|network| range.overlaps(*network)))
    }
}

/// Link-layer addresses of a pair: locally administered, made from the sandbox's address.
pub fn macs(address: Ipv4Addr) -> (Mac, Mac) {
    let [a, b, c, d] = address.octets();
    ([0x02, 0x01, a, b, c, d], [0x02, 0x02, a, b, c, d])
}

/// One line of the host's routing table.
#[derive(Debug, PartialEq, Eq)]
pub struct RouteLine {
    pub interface: String,
    pub network: (u32, u32),
}

/// The main table of the calling thread's network namespace.
pub fn routes() -> io::Result<Vec<RouteLine>> {
    Ok(parse_routes(&fs::read_to_string("/proc/thread-self/net/route")?))
}

fn parse_routes(table: &str) -> Vec<RouteLine> {
    let number = |text: &str| u32::from_str_radix(text, 16).ok().map(u32::from_be);
    let line = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let network = (number(fields.get(1)?)?, number(fields.get(7)?)?);
        Some(RouteLine { interface: (*fields.first()?).to_owned(), network })
    };
    table.lines().skip(1).filter_map(line).collect()
}

/// Interfaces of the calling thread's network namespace.
pub fn interfaces() -> io::Result<Vec<String>> {
    let table = fs::read_to_string("/proc/thread-self/net/dev")?;
    let names = table.lines().skip(2).filter_map(|line| line.split_once(':'));
    Ok(names.map(|(name, _)| name.trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
";

    #[test]
    fn the_routing_table() {
        let routes = parse_routes(TABLE);
        assert_eq!(routes[0], RouteLine { interface: "eth0".to_owned(), network: (0, 0) });
        assert_eq!(routes[1].network, (u32::from(Ipv4Addr::new(192, 0, 2, 0)), 0xffff_ff00));
    }

    #[test]
    fn names_are_short_and_found_again() {
        let names = Names::of(Path::new("/var/lib/sandmill"));
        let name = names.host_end(SLOTS - 1);
        assert!(name.len() <= 15, "{name}");
        assert_eq!(names.slot(&name), Some(SLOTS - 1));
        assert_eq!(names.slot(&names.gateway()), None);
        assert_eq!(Names::of(Path::new("/other")).slot(&name), None);
    }

    #[test]
    fn a_range_collides_with_nothing() {
        let names = Names::of(Path::new("/var/lib/sandmill"));
        let first = Range::choose(&names, &[(0, 0)]).unwrap();
        // A wider network around it, a host inside it.
        for taken in [(first.base & 0xffff_0000, 0xffff_0000), (first.base + 77, u32::MAX)] {
            let other = Range::choose(&names, &[taken]).unwrap();
            assert_ne!(other, first);
            assert!(!other.overlaps(taken));
        }
        assert_eq!(Range::choose(&names, &[(10 << 24, 0xff00_0000)]), None);
    }

    #[test]
    fn addresses() {
        let range = Range::new(Ipv4Addr::new(10, 64, 128, 0)).unwrap();
        assert_eq!(range.gateway(), Ipv4Addr::new(10, 64, 128, 1));
        assert_eq!(range.sandbox(0), Some(Ipv4Addr::new(10, 64, 128, 2)));
        assert!(range.contains(range.sandbox(SLOTS - 1).unwrap()));
        assert_eq!(range.sandbox(SLOTS), None);
        assert!(!range.contains(Ipv4Addr::new(10, 64, 127, 255)));
        assert_eq!(Range::new(Ipv4Addr::new(10, 64, 1, 0)), None);
    }
}
