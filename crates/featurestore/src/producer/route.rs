//! Which server gets the next request.

use transport_core::{Error, ErrorKind, Result};

use super::ProducerOptions;

/// How requests are spread over servers.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Routing {
    /// The first server with a free slot.
    #[default]
    Shared,
    /// The server with the fewest tokens under way.
    LeastTokens,
    /// The server with the most room in its arena, where the arenas' sizes are known.
    MostRoom,
}

/// Which part of an arena is left free.
const SPARE: u64 = 4;

/// One server, as the producer sees it.
#[derive(Debug)]
struct Server {
    url: String,
    calls: usize,
    tokens: u64,
    arena: Option<u64>,
    taken: u64,    // of the arena, by what is under way or not settled
    failures: u32, // in a row
    dropped: bool,
}

impl Server {
    /// Bytes that it has room for. Part of an arena is left free, where possible: its room is in
    /// pieces, and a large sample needs one of its size.
    fn room(&self, possible: bool) -> u64 {
        let Some(bytes) = self.arena else { return u64::MAX };
        let spare = if possible && self.taken > 0 { bytes / SPARE } else { 0 };
        (bytes - spare).saturating_sub(self.taken)
    }
}

/// Spreads requests and drops servers that keep failing.
#[derive(Debug)]
pub(super) struct Router {
    servers: Vec<Server>,
    routing: Routing,
    calls: usize,
    in_all: usize,
    failures: u32,
    next: usize,
}

impl Router {
    /// Routes as `options` say.
    pub(super) fn new(options: &ProducerOptions) -> Self {
        let server = |(at, url): (usize, &String)| Server {
            url: url.trim_end_matches('/').to_owned(),
            calls: 0,
            tokens: 0,
            arena: options.arenas.get(at).copied(),
            taken: 0,
            failures: 0,
            dropped: false,
        };
        Self {
            servers: options.servers.iter().enumerate().map(server).collect(),
            routing: options.routing,
            calls: options.concurrency.max(1),
            in_all: options.in_flight.unwrap_or(usize::MAX).max(1),
            failures: options.server_failures.max(1),
            next: 0,
        }
    }

    /// A server for a request that takes at least `bytes`, and its room; none while all are busy or
    /// full. `sparing` leaves a part of each arena free.
    pub(super) fn pick(&mut self, bytes: u64, sparing: bool) -> Option<(usize, u64)> {
        let count = self.servers.len();
        if self.servers.iter().map(|server| server.calls).sum::<usize>() >= self.in_all {
            return None;
        }
        let free = |at: &usize| {
            let server = &self.servers[*at];
            !server.dropped && server.calls < self.calls && server.room(sparing) >= bytes
        };
        let from_next = (0..count).map(|i| (self.next + i) % count).filter(free);
        let picked = match self.routing {
            Routing::Shared => from_next.min_by_key(|_| 0),
            Routing::LeastTokens => from_next.min_by_key(|&at| self.servers[at].tokens),
            Routing::MostRoom => {
                from_next.min_by_key(|&at| u64::MAX - self.servers[at].room(sparing))
            }
        }?;
        self.next = (picked + 1) % count;
        Some((picked, self.servers[picked].room(sparing)))
    }

    /// Room of all servers' arenas together, as far as it is known.
    pub(super) fn arenas(&self) -> u64 {
        self.servers.iter().filter_map(|server| server.arena).sum()
    }

    /// Takes room of a server's arena, for what is sent there.
    pub(super) fn fill(&mut self, server: usize, bytes: u64) {
        self.servers[server].taken += bytes;
    }

    /// Gives room of a server's arena back.
    pub(super) fn give_back(&mut self, server: usize, bytes: u64) {
        let server = &mut self.servers[server];
        server.taken = server.taken.saturating_sub(bytes);
    }

    pub(super) fn url(&self, server: usize) -> &str {
        &self.servers[server].url
    }

    pub(super) fn begin(&mut self, server: usize, tokens: u64) {
        self.servers[server].calls += 1;
        self.servers[server].tokens += tokens;
    }

    /// Ends a request; `answered` is whether the server served it at all. Whether it was dropped.
    pub(super) fn end(&mut self, server: usize, tokens: u64, answered: bool) -> bool {
        let most = self.failures;
        let server = &mut self.servers[server];
        server.calls -= 1;
        server.tokens -= tokens;
        server.failures = if answered { 0 } else { server.failures + 1 };
        let dropped = !server.dropped && server.failures >= most;
        server.dropped |= dropped;
        dropped
    }

    /// Takes a server back, such as one that was restarted.
    pub(super) fn revive(&mut self) {
        for server in &mut self.servers {
            (server.dropped, server.failures) = (false, 0);
        }
    }

    pub(super) fn alive(&self) -> usize {
        self.servers.iter().filter(|server| !server.dropped).count()
    }

    #[cfg(test)]
    fn under_way(&self) -> usize {
        self.servers.iter().map(|server| server.calls).sum()
    }

    /// Fails when every server was dropped.
    pub(super) fn check(&self, waiting: usize) -> Result<()> {
        if self.alive() > 0 {
            return Ok(());
        }
        let urls: Vec<&str> = self.servers.iter().map(|server| server.url.as_str()).collect();
        Err(Error::new(ErrorKind::PeerGone, "capture", "every capture server has failed")
            .with("servers", urls.join(", "))
            .with("failures_in_a_row", self.failures)
            .with("prompts_left", waiting)
            .remedy("see their logs, start them again, then run the producer again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router(routing: Routing) -> Router {
        let servers = vec!["http://a/".into(), "http://b".into()];
        let mut options = ProducerOptions::new(servers, "run");
        (options.routing, options.concurrency, options.server_failures) = (routing, 2, 3);
        (options.arenas, options.in_flight) = (vec![100, 80], Some(4));
        Router::new(&options)
    }

    fn pick(router: &mut Router) -> Option<usize> {
        router.pick(0, false).map(|(server, _)| server)
    }

    #[test]
    fn a_request_goes_only_where_it_fits() {
        let mut router = router(Routing::MostRoom);
        assert_eq!(router.pick(90, false), Some((0, 100)));
        router.fill(0, 90);
        assert_eq!(router.pick(5, false), Some((1, 80)), "the most room");
        router.fill(1, 75);
        assert_eq!(router.pick(11, false), None);
        router.give_back(0, 90);
        assert_eq!((router.pick(11, false), router.arenas()), (Some((0, 100)), 180));
        for server in [0, 0, 1, 1] {
            router.begin(server, 1);
        }
        assert_eq!(router.pick(0, false), None, "as many calls as there may be");
        let mut router = self::router(Routing::MostRoom);
        assert_eq!(router.pick(90, true), Some((0, 100)), "an empty one has all its room");
        router.fill(0, 40);
        router.fill(1, 40);
        assert_eq!(router.pick(30, true), Some((0, 35)));
        assert_eq!((router.pick(36, true), router.pick(36, false)), (None, Some((0, 60))));
    }

    #[test]
    fn least_tokens_evens_out_what_is_under_way() {
        let mut router = router(Routing::LeastTokens);
        let mut load = [0; 2];
        for tokens in [1000, 10, 10] {
            let server = pick(&mut router).unwrap();
            router.begin(server, tokens);
            load[server] += tokens;
        }
        assert_eq!(load, [1000, 20]);
        let last = pick(&mut router).unwrap();
        assert_eq!(router.url(last), "http://a", "b is busy");
        router.begin(last, 1);
        assert!(pick(&mut router).is_none());
        router.end(1, 10, true);
        assert_eq!(pick(&mut router), Some(1));
    }

    #[test]
    fn shared_takes_any_free_slot_in_turn() {
        let mut router = router(Routing::Shared);
        let order: Vec<_> = (0..4)
            .map(|_| {
                let server = pick(&mut router).unwrap();
                router.begin(server, 1);
                server
            })
            .collect();
        assert_eq!(order, [0, 1, 0, 1]);
        assert_eq!(router.under_way(), 4);
    }

    #[test]
    fn d18_three_failures_in_a_row_drop_a_server_and_none_left_is_an_error() {
        let mut router = router(Routing::Shared);
        let fail = |router: &mut Router, server| {
            router.begin(server, 1);
            router.end(server, 1, false)
        };
        assert!(!fail(&mut router, 0) && !fail(&mut router, 0));
        router.begin(0, 1);
        assert!(!router.end(0, 1, true), "an answer in between");
        assert!(!fail(&mut router, 0) && !fail(&mut router, 0) && fail(&mut router, 0));
        router.check(5).unwrap();
        assert_eq!(pick(&mut router), Some(1), "the survivor goes on");
        for _ in 0..3 {
            fail(&mut router, 1);
        }
        let error = router.check(5).unwrap_err();
        assert_eq!(error.context("prompts_left"), Some("5"), "{error}");
        router.revive();
        router.check(5).unwrap();
    }
}
