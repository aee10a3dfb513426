//! The table of open connections, and the choice of the one to close when a new connection finds no place.
//!
//! A connection is *awaited* while the server waits for its client: for a request, for the rest of a request, or for
//! the client to read its answer. If there is no place for a new connection, the server closes an awaited one, never
//! one whose client waits for the server. The oldest is closed first. So a client that sends its request at once is
//! served however many other clients send theirs slowly: its connection is the youngest.
//!
//! Connections that have shown a known key (without keys: that have requested something that needs one) are closed
//! after those that have not. The exception is one place in [`NEW_SHARE`], which stays available to new connections.
//! Otherwise the group with the most connections, an address or a key name, loses one first: the one that has been
//! awaited longest. Groups have no other limit, because behind a proxy all clients share one address.
use crate::shares::Place;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// One of this many places is for connections that have not shown a key yet.
const NEW_SHARE: usize = 8;

/// A client that reads nothing of its answer for this long counts as awaited. Shorter stalls are normal on a network.
const STALLED: Duration = Duration::from_secs(1);

/// The open connections.
pub(crate) struct Connections {
    most: usize,
    /// True if keys are configured. Connections that have shown a key are then grouped by its name, all others by
    /// address.
    has_names: bool,
    doors: Mutex<Doors>,
    displaced: AtomicU64,
}

#[derive(Default)]
struct Doors {
    next: u64,
    by_number: BTreeMap<u64, Arc<Door>>,
}

/// State of one connection that decides whether it is closed for another one.
pub(crate) struct Door {
    address: IpAddr,
    began: Instant,
    standing: Mutex<Standing>,
    /// Milliseconds after `began` at which the client stopped reading its answer. 0 if it is reading.
    stalled_ms: AtomicU64,
    /// A request was answered before all of it had arrived.
    unread: AtomicBool,
    close: Notify,
}

struct Standing {
    phase: Phase,
    since: Instant,
    /// The name of the key that was shown last.
    name: Option<Arc<str>>,
    /// Place of the request in progress, among those of its name.
    place: Option<Place>,
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
    Leaving,
}

/// A place among the connections. Dropping it frees the place.
pub(crate) struct Seat {
    connections: Arc<Connections>,
    number: u64,
    pub door: Arc<Door>,
}

impl Connections {
    pub fn new(most: usize, has_names: bool) -> Self {
        Connections { most, has_names, doors: Mutex::default(), displaced: AtomicU64::new(0) }
    }

    fn doors(&self) -> MutexGuard<'_, Doors> {
        self.doors.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Take a place for a new connection, closing another one if needed. `None` if all clients wait for the server.
    pub fn enter(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<Seat> {
        let mut doors = self.doors();
        if doors.by_number.len() >= self.most && !self.displace(&mut doors, now) {
            return None;
        }
        let door = Arc::new(Door::new(address, now));
        let number = doors.next;
        doors.next += 1;
        doors.by_number.insert(number, door.clone());
        Some(Seat { connections: self.clone(), number, door })
    }

    /// Close up to `n` awaited connections although there are places: the system has no more file descriptors. Returns
    /// whether any was closed.
    pub fn make_room(&self, n: usize, now: Instant) -> bool {
        let mut doors = self.doors();
        (0..n).take_while(|_| self.displace(&mut doors, now)).count() > 0
    }

    fn displace(&self, doors: &mut Doors, now: Instant) -> bool {
        let Some(number) = self.victim(doors, now) else { return false };
        if let Some(door) = doors.by_number.remove(&number) {
            door.close.notify_one();
        }
        self.displaced.fetch_add(1, Relaxed);
        true
    }

    fn victim(&self, doors: &Doors, now: Instant) -> Option<u64> {
        let mut unknown: BTreeMap<Group, Awaited> = BTreeMap::new();
        let mut known: BTreeMap<Group, Awaited> = BTreeMap::new();
        for (number, door) in &doors.by_number {
            let standing = door.standing();
            let Some(since) = door.awaited(&standing, now) else { continue };
            let class = if standing.name.is_some() { &mut known } else { &mut unknown };
            let group = match &standing.name {
                Some(name) if self.has_names => Group::Name(name.clone()),
                _ => Group::Address(door.network()),
            };
            let group = class.entry(group).or_insert(Awaited { n: 0, since, number: *number });
            group.n += 1;
            if (since, *number) < (group.since, group.number) {
                (group.since, group.number) = (since, *number);
            }
        }
        let new: usize = unknown.values().map(|group| group.n).sum();
        let spared = new <= self.most.div_ceil(NEW_SHARE) && !known.is_empty();
        let class = if spared || unknown.is_empty() { known } else { unknown };
        let first =
            class.into_values().min_by_key(|group| (std::cmp::Reverse(group.n), group.since, group.number));
        first.map(|group| group.number)
    }

    /// The number of open connections, and how many of them have shown a known key.
    pub fn count(&self) -> (usize, usize) {
        let doors = self.doors();
        let known = doors.by_number.values().filter(|door| door.standing().name.is_some()).count();
        (doors.by_number.len(), known)
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

impl Drop for Seat {
    fn drop(&mut self) {
        self.connections.doors().by_number.remove(&self.number);
    }
}

impl Door {
    fn new(address: IpAddr, now: Instant) -> Self {
        let standing = Standing { phase: Phase::Idle, since: now, name: None, place: None };
        Door {
            address,
            began: now,
            standing: Mutex::new(standing),
            stalled_ms: AtomicU64::new(0),
            unread: AtomicBool::new(false),
            close: Notify::new(),
        }
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// The address; for IPv6 the /64 network, which is what one customer of a provider usually has.
    fn network(&self) -> IpAddr {
        match self.address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            v4 => v4,
        }
    }

    fn awaited(&self, standing: &Standing, now: Instant) -> Option<Instant> {
        if standing.phase != Phase::Answer {
            return Some(standing.since);
        }
        self.stalled().filter(|since| now.saturating_duration_since(*since) >= STALLED)
    }

    /// Waits until this connection must close to make room.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    pub fn phase(&self) -> Phase {
        self.standing().phase
    }

    /// Move to the next phase. If `behind` is given, only from that phase.
    pub fn goes_on(&self, behind: Option<Phase>, to: Phase) {
        let mut standing = self.standing();
        if behind.is_none_or(|phase| phase == standing.phase) {
            (standing.phase, standing.since) = (to, Instant::now());
            if to == Phase::Idle {
                standing.place = None;
            }
        }
    }

    /// Record that a key of this name was shown, and the place of the request in progress.
    pub fn knows(&self, name: &Arc<str>, place: Place) {
        let mut standing = self.standing();
        (standing.name, standing.place) = (Some(name.clone()), Some(place));
    }

    /// Returns whether the client has taken this long to send the head of a request.
    pub fn dribbles(&self, longest: Duration) -> bool {
        let standing = self.standing();
        standing.phase == Phase::Head && standing.since.elapsed() >= longest
    }

    /// Since when the client has read nothing of its answer. `None` if it is reading.
    pub fn stalled(&self) -> Option<Instant> {
        let ms = self.stalled_ms.load(Relaxed);
        (ms > 0).then(|| self.began + Duration::from_millis(ms))
    }

    pub fn stalls(&self) {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        let _ = self.stalled_ms.compare_exchange(0, now, Relaxed, Relaxed);
    }

    pub fn takes(&self) {
        self.stalled_ms.store(0, Relaxed);
    }

    /// Record that a request was answered before all of it had arrived.
    pub fn leave_unread(&self) {
        self.unread.store(true, Relaxed);
    }
    pub fn has_unread(&self) -> bool {
        self.unread.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::Shares;

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// Connections under test, with a clock of their own: each is a second younger than the one before.
    struct Hall {
        connections: Arc<Connections>,
        seats: Vec<Seat>,
        now: Instant,
    }

    impl Hall {
        fn new(most: usize) -> Self {
            Hall {
                connections: Arc::new(Connections::new(most, true)),
                seats: Vec::new(),
                now: Instant::now(),
            }
        }

        /// Returns the index of the new seat among all seats so far.
        fn enter(&mut self, last: u8) -> Option<usize> {
            self.now += Duration::from_secs(1);
            let seat = self.connections.enter(address(last), self.now)?;
            self.seats.push(seat);
            Some(self.seats.len() - 1)
        }

        fn is_there(&self, i: usize) -> bool {
            self.connections.doors().by_number.contains_key(&self.seats[i].number)
        }

        fn set(&self, i: usize, phase: Phase) {
            let mut standing = self.seats[i].door.standing();
            (standing.phase, standing.since) = (phase, self.now);
        }

        fn know(&self, i: usize, name: &str) {
            let name: Arc<str> = name.into();
            let place = Shares::new(1, &[]).take(&name).ok().unwrap();
            self.seats[i].door.knows(&name, place);
        }

        fn gone(&self) -> Vec<usize> {
            (0..self.seats.len()).filter(|i| !self.is_there(*i)).collect()
        }
    }

    #[test]
    fn the_oldest_that_dribbles_makes_room() {
        let mut hall = Hall::new(3);
        let mine = (0..3).map(|_| hall.enter(1).unwrap()).collect::<Vec<_>>();
        hall.set(mine[0], Phase::Answer);
        assert!(hall.enter(1).is_some());
        assert_eq!(hall.gone(), [1]);
        assert!(hall.enter(1).is_some());
        assert_eq!(hall.gone(), [1, 2]);
        assert_eq!((hall.connections.count(), hall.connections.displaced()), ((3, 0), 2));
        // If the system has no more file descriptors, several are closed at once.
        assert!(hall.connections.make_room(5, hall.now));
        assert_eq!((hall.gone(), hall.connections.displaced()), (vec![1, 2, 3, 4], 4));
        // Connections that end by themselves free their places.
        hall.seats.clear();
        assert_eq!(hall.connections.count(), (0, 0));
    }

    #[test]
    fn where_all_clients_wait_none_is_closed() {
        let mut hall = Hall::new(2);
        for _ in 0..2 {
            let i = hall.enter(1).unwrap();
            hall.set(i, Phase::Answer);
        }
        assert_eq!(hall.enter(2), None);
        assert!(!hall.connections.make_room(3, hall.now));
        assert_eq!(hall.connections.displaced(), 0);
        // But a client that reads nothing of its answer is awaited.
        hall.seats[1].door.stalls();
        hall.now += Duration::from_secs(30);
        assert!(hall.enter(2).is_some());
        assert_eq!(hall.gone(), [1]);
        hall.seats[0].door.stalls();
        hall.seats[0].door.takes();
        hall.set(2, Phase::Answer);
        assert_eq!(hall.enter(2), None);
    }

    #[test]
    fn the_address_with_the_most_makes_room() {
        let mut hall = Hall::new(10);
        let first = hall.enter(1).unwrap();
        for _ in 0..9 {
            hall.enter(2).unwrap();
        }
        for _ in 0..50 {
            hall.enter(2).unwrap();
        }
        assert!(hall.is_there(first), "the oldest of all, and the only one of its address");
        // Addresses of one customer's network count as one. An IPv4-mapped IPv6 address counts as the IPv4 address.
        let door = |text: &str| Door::new(text.parse().unwrap(), Instant::now()).network();
        assert_eq!(door("2001:db8:1:2:3:4:5:6"), door("2001:db8:1:2:ffff::1"));
        assert_ne!(door("2001:db8:1:2::1"), door("2001:db8:1:3::1"));
        assert_eq!(door("::ffff:10.0.0.1"), address(1));
        assert_ne!(door("10.0.0.1"), door("10.0.0.2"));
    }

    /// Connections with a key win over those without, except for one place in eight.
    #[test]
    fn those_with_a_key_stay_and_new_ones_come_in() {
        let mut hall = Hall::new(16);
        let known: Vec<usize> = (0..16).map(|_| hall.enter(1).unwrap()).collect();
        known.iter().for_each(|i| hall.know(*i, if *i < 10 { "ann" } else { "bob" }));
        for _ in 0..100 {
            hall.enter(2).unwrap();
        }
        // Three new connections have come in. From then on each new one replaces one of them.
        let there = |range: &[usize]| range.iter().filter(|i| hall.is_there(**i)).count();
        assert_eq!(hall.gone()[..3], [0, 1, 2], "the oldest of the name that has most");
        assert_eq!((there(&known[..10]), there(&known[10..])), (7, 6));
        assert_eq!(hall.connections.count(), (16, 13));
        assert_eq!(there(&[113, 114, 115]), 3, "the youngest of the new ones");
    }

    #[test]
    fn phases_follow_each_other() {
        let hall = {
            let mut hall = Hall::new(1);
            hall.enter(1).unwrap();
            hall
        };
        let door = &hall.seats[0].door;
        assert!(!door.dribbles(Duration::ZERO), "nothing has come");
        door.goes_on(Some(Phase::Idle), Phase::Head);
        assert!(door.dribbles(Duration::ZERO) && !door.dribbles(Duration::from_secs(3600)));
        door.goes_on(Some(Phase::Idle), Phase::Head);
        door.goes_on(None, Phase::Body);
        assert!(!door.dribbles(Duration::ZERO));
        door.goes_on(Some(Phase::Idle), Phase::Head);
        assert_eq!(door.phase(), Phase::Body, "what is read now is its body");
        let shares = Shares::new(1, &[]);
        door.knows(&"ann".into(), shares.take(&"ann".into()).ok().unwrap());
        door.goes_on(Some(Phase::Body), Phase::Answer);
        assert!(!shares.has_room("ann"));
        door.goes_on(None, Phase::Idle);
        assert!(shares.has_room("ann"), "a request that is over takes no place");
    }
}
