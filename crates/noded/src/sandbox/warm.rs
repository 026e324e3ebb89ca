//! The warm pool: sandboxes that are made before anyone asks for them, since most creates are like the one before.
//!
//! A shape that was asked for twice within [`RECENT`] gets sandboxes made ahead, while nothing else starts. They differ in nothing
//! from others but for what belongs to a caller (id, token, environment, user, lease), which comes with the claim. Nobody is
//! told of them, they are on no list, and they end with noded, or when they weren't needed for a while.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    build::Warm,
    spec::{LeaseSpec, Limits, NetworkMode, SandboxSpec},
};
use crate::images::ResolvedImage;

/// What lies longer between two asks is no habit.
const RECENT: Duration = Duration::from_secs(30);
/// A warm sandbox that nobody has taken by then is removed.
const KEPT: Duration = Duration::from_secs(60);
/// Shapes that are remembered, at most.
const SHAPES: usize = 32;

/// What decides how a sandbox is made.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    image: String,
    limits: Limits,
    plain_disk: bool,
}

impl Shape {
    /// None: such a sandbox is made when it is asked for. Its network and its name have to be there from the beginning.
    pub fn of(spec: &SandboxSpec, image: &ResolvedImage) -> Option<Self> {
        let usual = spec.network == NetworkMode::None && spec.hostname.is_none();
        usual.then(|| Self { image: image.id.clone(), limits: spec.limits.clone(), plain_disk: spec.plain_disk })
    }

    /// Of a sandbox that belongs to nobody.
    pub fn spec(&self, id: String) -> SandboxSpec {
        SandboxSpec {
            id,
            image: self.image.clone(),
            token: String::new(),
            env: std::collections::BTreeMap::new(),
            workdir: None,
            user: None,
            hostname: None,
            network: NetworkMode::None,
            limits: self.limits.clone(),
            lease: LeaseSpec { ttl_s: KEPT.as_secs_f64(), renew_on_use: false },
            plain_disk: self.plain_disk,
        }
    }
}

/// Which shapes were asked for, and what is ready for them. `W` is a warm sandbox.
pub struct Pool<W = Warm> {
    most: usize,
    habits: Vec<Habit>,
    ready: Vec<Ready<W>>,
}

struct Habit {
    shape: Shape,
    image: Arc<ResolvedImage>,
    /// Asks of which each came soon after the one before.
    asks: usize,
    last: Instant,
}

struct Ready<W> {
    shape: Shape,
    warm: W,
    since: Instant,
}

impl<W> Pool<W> {
    /// At most `most` sandboxes are kept; 0 turns it off.
    pub fn new(most: usize) -> Self {
        Self { most, habits: Vec::new(), ready: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.ready.len()
    }

    /// Notes that this shape is asked for.
    pub fn asked(&mut self, shape: &Shape, image: &Arc<ResolvedImage>, now: Instant) {
        if self.most == 0 {
            return;
        }
        let at = self.habits.iter().position(|habit| habit.shape == *shape);
        let mut habit = match at {
            Some(at) => self.habits.remove(at),
            None => Habit { shape: shape.clone(), image: Arc::clone(image), asks: 0, last: now },
        };
        habit.asks = if now.duration_since(habit.last) > RECENT { 1 } else { habit.asks + 1 };
        habit.last = now;
        self.habits.push(habit); // the last is the latest
        if self.habits.len() > SHAPES {
            self.habits.remove(0);
        }
    }

    /// Gives a sandbox of this shape if one is ready, the oldest, which counts as an ask.
    pub fn take(&mut self, shape: &Shape, image: &Arc<ResolvedImage>, now: Instant) -> Option<W> {
        let at = self.ready.iter().position(|ready| ready.shape == *shape)?;
        self.asked(shape, image, now);
        Some(self.ready.remove(at).warm)
    }

    /// What to make next, if anything is missing.
    pub fn missing(&self, now: Instant) -> Option<(Shape, Arc<ResolvedImage>)> {
        if self.ready.len() >= self.most {
            return None;
        }
        let wanted = self.habits.iter().rev().find(|habit| {
            let have = self.ready.iter().filter(|ready| ready.shape == habit.shape).count();
            now.duration_since(habit.last) <= RECENT && have + 1 < habit.asks.min(self.most + 1)
        })?;
        Some((wanted.shape.clone(), Arc::clone(&wanted.image)))
    }

    pub fn put(&mut self, shape: Shape, warm: W, now: Instant) {
        self.ready.push(Ready { shape, warm, since: now });
    }

    /// Takes out those that nobody needed. Habits that are over let go of their images.
    pub fn stale(&mut self, now: Instant) -> Vec<W> {
        self.habits.retain(|habit| now.duration_since(habit.last) <= RECENT);
        self.ready.extract_if(.., |ready| now.duration_since(ready.since) > KEPT).map(|ready| ready.warm).collect()
    }

    /// Takes out all, and forgets what was asked for.
    pub fn clear(&mut self) -> Vec<W> {
        self.habits.clear();
        self.ready.drain(..).map(|ready| ready.warm).collect()
    }

    /// Takes out all, for good.
    pub fn close(&mut self) -> Vec<W> {
        self.most = 0;
        self.clear()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str) -> Arc<ResolvedImage> {
        Arc::new(ResolvedImage { id: id.to_owned(), trees: Vec::new(), config: crate::images::ImageConfig::default() })
    }

    fn shape(image: &ResolvedImage) -> Shape {
        Shape::of(&super::super::record::Record::sample().spec, image).unwrap()
    }

    #[test]
    fn twice_makes_a_habit_and_a_habit_is_served() {
        let (a, now) = (image("a"), Instant::now());
        let mut pool = Pool::new(2);
        assert_eq!(pool.take(&shape(&a), &a, now), None);
        pool.asked(&shape(&a), &a, now);
        assert!(pool.missing(now).is_none(), "once is none");
        pool.asked(&shape(&a), &a, now);
        let (wanted, _) = pool.missing(now).unwrap();
        pool.put(wanted.clone(), 1, now);
        assert!(pool.missing(now).is_none(), "no more than were asked for again");
        assert_eq!(pool.take(&wanted, &a, now), Some(1));
        for made in [2, 3] {
            assert!(pool.missing(now).is_some());
            pool.put(wanted.clone(), made, now);
        }
        assert!(pool.missing(now).is_none(), "the pool is full");
        assert_eq!(pool.take(&wanted, &a, now), Some(2), "the oldest first");
    }

    #[test]
    fn another_shape_gets_none_of_it() {
        let (a, b, now) = (image("a"), image("b"), Instant::now());
        let mut pool = Pool::new(4);
        for _ in 0..3 {
            pool.asked(&shape(&a), &a, now);
        }
        pool.put(shape(&a), "of a", now);
        assert_eq!(pool.take(&shape(&b), &b, now), None);
        let mut spec = super::super::record::Record::sample().spec;
        spec.limits.memory_bytes = Some(1 << 30);
        assert_eq!(pool.take(&Shape::of(&spec, &a).unwrap(), &a, now), None);
        spec.network = NetworkMode::All;
        assert!(Shape::of(&spec, &a).is_none());
    }

    #[test]
    fn what_is_not_needed_goes() {
        let (a, now) = (image("a"), Instant::now());
        let mut pool = Pool::new(4);
        pool.asked(&shape(&a), &a, now);
        pool.asked(&shape(&a), &a, now);
        pool.put(shape(&a), (), now);
        assert!(pool.stale(now + KEPT / 2).is_empty());
        assert!(pool.missing(now + RECENT * 2).is_none());
        assert_eq!(pool.stale(now + KEPT * 2).len(), 1);
        assert_eq!(Arc::strong_count(&a), 1, "its image can be removed");
        pool.asked(&shape(&a), &a, now + KEPT * 3);
        assert!(pool.missing(now + KEPT * 3).is_none(), "the habit begins anew");
    }

    #[test]
    fn a_closed_pool_makes_nothing() {
        let (a, now) = (image("a"), Instant::now());
        let mut pool = Pool::new(4);
        pool.asked(&shape(&a), &a, now);
        pool.asked(&shape(&a), &a, now);
        pool.put(shape(&a), (), now);
        assert_eq!(pool.close().len(), 1);
        pool.asked(&shape(&a), &a, now);
        pool.asked(&shape(&a), &a, now);
        assert!(pool.missing(now).is_none());
    }
}
