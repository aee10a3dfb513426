//! The table of open connections, and the choice of the one to close when a new connection finds no permit.
//!
//! A connection is *awaited* while the server waits for its client: for a request, for the rest of a request, or for
//! the client to read its answer. If there is no permit for a new connection, the server closes an awaited one, never
//! one whose client waits for the server. The oldest is closed first. So a client that sends its request at once is
//! served however many other clients send theirs slowly: its connection is the youngest.
//!
//! Connections that have shown a known key (without keys: that have requested something that needs one) are closed
//! after those that have not. The exception is one permit in [`NEW_SHARE`], which stays available to new connections.
//! Otherwise the group with the most connections, an address or a key name, loses one first: the one that has been
//! awaited longest. Groups have no other limit, because behind a proxy all clients share one address.
use kvist_engine::serving::QuotaPermit;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// One of this many permits is for connections that have not shown a key yet.
const NEW_SHARE: usize = 8;

/// A client that reads nothing of its answer for this long counts as awaited. Shorter stalls are normal on a network.
const STALLED: Duration = Duration::from_secs(1);

/// The open connections.
pub(crate) struct Connections {
    max: usize,
    /// True if keys are configured. Connections that have shown a key are then grouped by its name, all others by
    /// address.
    has_names: bool,
    open: Mutex<Open>,
    displaced: AtomicU64,
}

#[derive(Default)]
struct Open {
    next: u64,
    by_number: BTreeMap<u64, Arc<Connection>>,
}

/// State of one connection that decides whether it is closed for another one.
pub(crate) struct Connection {
    address: IpAddr,
    began: Instant,
    status: Mutex<Status>,
    /// Milliseconds after `began` at which the client stopped reading its answer. 0 if it is reading.
    stalled_ms: AtomicU64,
    /// A request was answered before all of it had arrived.
    unread: AtomicBool,
    close: Notify,
}

struct Status {
    phase: Phase,
    since: Instant,
    /// The name of the key that was shown last.
    name: Option<Arc<str>>,
    /// Permit of the request in progress, in the quota of its name.
    quota_permit: Option<QuotaPermit>,
}

/// What happens next on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A request may arrive.
    Idle,
    /// The rest of a request's head is still to arrive.
    Head,
    /// The rest of a request's body is still to arrive.
    Body,
    /// The answer is being computed and sent.
    Answer,
    /// Nothing: the client may read the last answer before the connection is closed.
    Closing,
}

/// A permit among the connections. Dropping it frees the permit.
pub(crate) struct ConnectionPermit {
    connections: Arc<Connections>,
    number: u64,
    pub connection: Arc<Connection>,
}

impl Connections {
    pub fn new(max: usize, has_names: bool) -> Self {
        Connections { max, has_names, open: Mutex::default(), displaced: AtomicU64::new(0) }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Take a permit for a new connection, closing another one if needed. `None` if all clients wait for the server.
    pub fn enter(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<ConnectionPermit> {
        let mut open = self.open();
        if open.by_number.len() >= self.max && !self.displace_one(&mut open, now) {
            return None;
        }
        let connection = Arc::new(Connection::new(address, now));
        let number = open.next;
        open.next += 1;
        open.by_number.insert(number, connection.clone());
        Some(ConnectionPermit { connections: self.clone(), number, connection })
    }

    /// Close up to `n` awaited connections although there are permits: the system has no more file descriptors. Returns
    /// whether any was closed.
    pub fn displace(&self, n: usize, now: Instant) -> bool {
        let mut open = self.open();
        (0..n).take_while(|_| self.displace_one(&mut open, now)).count() > 0
    }

    fn displace_one(&self, open: &mut Open, now: Instant) -> bool {
        let Some(number) = self.victim(open, now) else { return false };
        if let Some(connection) = open.by_number.remove(&number) {
            connection.close.notify_one();
        }
        self.displaced.fetch_add(1, Relaxed);
        true
    }

    fn victim(&self, open: &Open, now: Instant) -> Option<u64> {
        let mut unknown: BTreeMap<Group, Awaited> = BTreeMap::new();
        let mut known: BTreeMap<Group, Awaited> = BTreeMap::new();
        for (number, connection) in &open.by_number {
            let status = connection.status();
            let Some(since) = connection.awaited(&status, now) else { continue };
            let class = if status.name.is_some() { &mut known } else { &mut unknown };
            let group = match &status.name {
                Some(name) if self.has_names => Group::Name(name.clone()),
                _ => Group::Address(connection.network()),
            };
            let group = class.entry(group).or_insert(Awaited { n: 0, since, number: *number });
            group.n += 1;
            if (since, *number) < (group.since, group.number) {
                (group.since, group.number) = (since, *number);
            }
        }
        let new: usize = unknown.values().map(|group| group.n).sum();
        let close_known = new <= self.max.div_ceil(NEW_SHARE) && !known.is_empty();
        let class = if close_known || unknown.is_empty() { known } else { unknown };
        let first =
            class.into_values().min_by_key(|group| (std::cmp::Reverse(group.n), group.since, group.number));
        first.map(|group| group.number)
    }

    /// The number of open connections, and how many of them have shown a known key.
    pub fn count(&self) -> (usize, usize) {
        let open = self.open();
        let known = open.by_number.values().filter(|connection| connection.status().name.is_some()).count();
        (open.by_number.len(), known)
    }

    /// Connections that were closed to make room.
    pub fn displaced(&self) -> u64 {
        self.displaced.load(Relaxed)
    }
}

/// The group that a connection belongs to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Address(IpAddr),
    Name(Arc<str>),
}

/// The awaited connections of a group: their number, and the one that has been awaited longest.
struct Awaited {
    n: usize,
    since: Instant,
    number: u64,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.open().by_number.remove(&self.number);
    }
}

impl Connection {
    fn new(address: IpAddr, now: Instant) -> Self {
        let status = Status { phase: Phase::Idle, since: now, name: None, quota_permit: None };
        Connection {
            address,
            began: now,
            status: Mutex::new(status),
            stalled_ms: AtomicU64::new(0),
            unread: AtomicBool::new(false),
            close: Notify::new(),
        }
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// The address; for IPv6 the /64 network, which is what one customer of a provider usually has.
    fn network(&self) -> IpAddr {
        match self.address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            v4 => v4,
        }
    }

    fn awaited(&self, status: &Status, now: Instant) -> Option<Instant> {
        if status.phase != Phase::Answer {
            return Some(status.since);
        }
        self.stalled().filter(|since| now.saturating_duration_since(*since) >= STALLED)
    }

    /// Waits until this connection must close to make room.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    pub fn phase(&self) -> Phase {
        self.status().phase
    }

    /// Move to phase `to`. If `from` is given, only from that phase.
    pub fn advance(&self, from: Option<Phase>, to: Phase) {
        let mut status = self.status();
        if from.is_none_or(|phase| phase == status.phase) {
            (status.phase, status.since) = (to, Instant::now());
            if to == Phase::Idle {
                status.quota_permit = None;
            }
        }
    }

    /// Record that a key of this name was shown, and the permit of the request in progress.
    pub fn set_caller(&self, name: &Arc<str>, quota_permit: QuotaPermit) {
        let mut status = self.status();
        (status.name, status.quota_permit) = (Some(name.clone()), Some(quota_permit));
    }

    /// Returns whether the client has taken this long to send the head of a request.
    pub fn is_slow_head(&self, longest: Duration) -> bool {
        let status = self.status();
        status.phase == Phase::Head && status.since.elapsed() >= longest
    }

    /// Since when the client has read nothing of its answer. `None` if it is reading.
    pub fn stalled(&self) -> Option<Instant> {
        let ms = self.stalled_ms.load(Relaxed);
        (ms > 0).then(|| self.began + Duration::from_millis(ms))
    }

    pub fn set_stalled(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        let _ = self.stalled_ms.compare_exchange(0, now, Relaxed, Relaxed);
    }

    pub fn clear_stalled(&self) {
        self.stalled_ms.store(0, Relaxed);
    }

    /// Record that a request was answered before all of it had arrived.
    pub fn set_unread(&self) {
        self.unread.store(true, Relaxed);
    }
    pub fn has_unread(&self) -> bool {
        self.unread.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_engine::serving::TenantQuota;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Connections under test, with a clock of their own: each is a second younger than the one before.
    struct TestConnections {
        connections: Arc<Connections>,
        permits: Vec<ConnectionPermit>,
        now: Instant,
    }

    impl TestConnections {
        fn new(max: usize) -> Self {
            TestConnections {
                connections: Arc::new(Connections::new(max, true)),
                permits: Vec::new(),
                now: Instant::now(),
            }
        }

        /// Returns the index of the new permit among all permits so far.
        fn enter(&mut self, last: u8) -> Option<usize> {
            self.now += Duration::from_secs(1);
            let permit = self.connections.enter(address(last), self.now)?;
            self.permits.push(permit);
            Some(self.permits.len() - 1)
        }

        fn is_there(&self, i: usize) -> bool {
            self.connections.open().by_number.contains_key(&self.permits[i].number)
        }

        fn set(&self, i: usize, phase: Phase) {
            let mut status = self.permits[i].connection.status();
            (status.phase, status.since) = (phase, self.now);
        }

        fn know(&self, i: usize, name: &str) {
            let name: Arc<str> = name.into();
            let quota_permit = TenantQuota::new(1, &[]).take(&name).ok().unwrap();
            self.permits[i].connection.set_caller(&name, quota_permit);
        }

        fn gone(&self) -> Vec<usize> {
            (0..self.permits.len()).filter(|i| !self.is_there(*i)).collect()
        }
    }

    #[test]
    fn the_oldest_awaited_connection_is_closed() {
        let mut test = TestConnections::new(3);
        let mine = (0..3).map(|_| test.enter(1).unwrap()).collect::<Vec<_>>();
        test.set(mine[0], Phase::Answer);
        assert!(test.enter(1).is_some());
        assert_eq!(test.gone(), [1]);
        assert!(test.enter(1).is_some());
        assert_eq!(test.gone(), [1, 2]);
        assert_eq!((test.connections.count(), test.connections.displaced()), ((3, 0), 2));
        // If the system has no more file descriptors, several are closed at once.
        assert!(test.connections.displace(5, test.now));
        assert_eq!((test.gone(), test.connections.displaced()), (vec![1, 2, 3, 4], 4));
        // Connections that end by themselves free their permits.
        test.permits.clear();
        assert_eq!(test.connections.count(), (0, 0));
    }

    #[test]
    fn where_all_clients_wait_none_is_closed() {
        let mut test = TestConnections::new(2);
        for _ in 0..2 {
            let i = test.enter(1).unwrap();
            test.set(i, Phase::Answer);
        }
        assert_eq!(test.enter(2), None);
        assert!(!test.connections.displace(3, test.now));
        assert_eq!(test.connections.displaced(), 0);
        // But a client that reads nothing of its answer is awaited.
        test.permits[1].connection.set_stalled();
        test.now += Duration::from_secs(30);
        assert!(test.enter(2).is_some());
        assert_eq!(test.gone(), [1]);
        test.permits[0].connection.set_stalled();
        test.permits[0].connection.clear_stalled();
        test.set(2, Phase::Answer);
        assert_eq!(test.enter(2), None);
    }

    #[test]
    fn the_address_with_the_most_makes_room() {
        let mut test = TestConnections::new(10);
        let first = test.enter(1).unwrap();
        for _ in 0..9 {
            test.enter(2).unwrap();
        }
        for _ in 0..50 {
            test.enter(2).unwrap();
        }
        assert!(test.is_there(first), "the oldest of all, and the only one of its address");
        // Addresses of one customer's network count as one. An IPv4-mapped IPv6 address counts as the IPv4 address.
        let connection = |text: &str| Connection::new(text.parse().unwrap(), Instant::now()).network();
        assert_eq!(connection("2001:db8:1:2:3:4:5:6"), connection("2001:db8:1:2:ffff::1"));
        assert_ne!(connection("2001:db8:1:2::1"), connection("2001:db8:1:3::1"));
        assert_eq!(connection("::ffff:10.0.0.1"), address(1));
        assert_ne!(connection("10.0.0.1"), connection("10.0.0.2"));
    }

    /// Connections with a key win over those without, except for one permit in eight.
    #[test]
    fn those_with_a_key_stay_and_new_ones_come_in() {
        let mut test = TestConnections::new(16);
        let known: Vec<usize> = (0..16).map(|_| test.enter(1).unwrap()).collect();
        known.iter().for_each(|i| test.know(*i, if *i < 10 { "ann" } else { "bob" }));
        for _ in 0..100 {
            test.enter(2).unwrap();
        }
        // Three new connections have come in. From then on each new one replaces one of them.
        let there = |range: &[usize]| range.iter().filter(|i| test.is_there(**i)).count();
        assert_eq!(test.gone()[..3], [0, 1, 2], "the oldest of the name that has most");
        assert_eq!((there(&known[..10]), there(&known[10..])), (7, 6));
        assert_eq!(test.connections.count(), (16, 13));
        assert_eq!(there(&[113, 114, 115]), 3, "the youngest of the new ones");
    }

    #[test]
    fn phases_follow_each_other() {
        let test = {
            let mut test = TestConnections::new(1);
            test.enter(1).unwrap();
            test
        };
        let connection = &test.permits[0].connection;
        assert!(!connection.is_slow_head(Duration::ZERO), "nothing has come");
        connection.advance(Some(Phase::Idle), Phase::Head);
        assert!(
            connection.is_slow_head(Duration::ZERO) && !connection.is_slow_head(Duration::from_secs(3600))
        );
        connection.advance(Some(Phase::Idle), Phase::Head);
        connection.advance(None, Phase::Body);
        assert!(!connection.is_slow_head(Duration::ZERO));
        connection.advance(Some(Phase::Idle), Phase::Head);
        assert_eq!(connection.phase(), Phase::Body, "what is read now is its body");
        let quota = TenantQuota::new(1, &[]);
        connection.set_caller(&"ann".into(), quota.take(&"ann".into()).ok().unwrap());
        connection.advance(Some(Phase::Body), Phase::Answer);
        assert!(!quota.has_room("ann"));
        connection.advance(None, Phase::Idle);
        assert!(quota.has_room("ann"), "a request that is over takes no slot");
    }
}
