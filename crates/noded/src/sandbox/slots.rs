//! Ranges of host ids, one for each sandbox.

/// First host id of slot 0.
const FIRST_ID: u32 = 0x4000_0000;
/// Ids of a slot.
const RANGE: u32 = 65536;
/// Sandboxes on one node, at most: ids from 2^31 on are not everywhere treated as positive.
pub const SLOTS: u32 = 16384;

/// Free slots; the one freed last is used first, so that its caches are warm.
#[derive(Debug, Default)]
pub struct Slots {
    next: u32,
    free: Vec<u32>,
}

impl Slots {
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            (self.next < SLOTS).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    /// Marks a slot as taken that a sandbox from before a restart holds.
    pub fn claim(&mut self, slot: u32) {
        while self.next <= slot && self.next < SLOTS {
            self.free.push(self.next);
            self.next += 1;
        }
        self.free.retain(|free| *free != slot);
    }

    pub fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }
}

pub fn uid_base(slot: u32) -> u32 {
    FIRST_ID + slot * RANGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_slot_twice() {
        let mut slots = Slots::default();
        slots.claim(2);
        let mut taken: Vec<u32> = (0..SLOTS - 1).map(|_| slots.take().unwrap()).collect();
        assert_eq!(slots.take(), None);
        assert!(!taken.contains(&2));
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken.len() as u32, SLOTS - 1);
        slots.give_back(7);
        assert_eq!(slots.take(), Some(7));
    }

    #[test]
    fn ids_stay_below_two_to_the_31() {
        assert_eq!(uid_base(0), 0x4000_0000);
        assert!(u64::from(uid_base(SLOTS - 1)) + u64::from(RANGE) <= 1 << 31);
    }
}
