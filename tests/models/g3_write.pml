/* G3: reserve, write, sync, publish, by several processes over one directory.

   A transaction of the index is one atomic step. A write is two, since it can be seen and cut off half done. A process
   has lanes, each of which takes one block after another from RAM into a slot. A process may be killed at any time; a
   lane that is inside a write goes on, since the kernel ends the call. A process may stop for any time: then it takes no
   step. Loss of power takes no step, either: INTACT says of every state that the medium has what the index names.

   The bytes of a block are a number: its name, and how many purges there had been when it was taken.

   Invariants:
     INTACT   the bytes of each entry's slot are its block's, as read and as they lie on the medium
     OWNED    a lane writes only into a slot that is reserved for it
     COUNTED  each held slot is of one entry; in the end no slot is reserved but what a lane keeps for later
     CLOSED   a child that is not purged is here only if its parent is, and is not purged
     SERVED   a read gives the bytes that its entry names, or none; no purge covers them that came before it
     SOUND    no read takes a sound block for damage

   BUG plants an error, which breaks one of them. Lines that begin with a word and numbers are the history of a
   simulated run, which tests/models/test_g3_history.py repeats with the real index. */

#define NO_BUG 0
#define PUBLISHED_BEFORE_WRITTEN 1
#define PUBLISHED_BEFORE_SYNCED 2
#define RECLAIMED_BY_AGE 3
#define RECLAIMED_WHILE_IN_THE_KERNEL 4
#define PARENT_UNCHECKED_AT_THE_END 5
#define PARENT_EVICTED_FIRST 6
#define DAMAGE_BY_PLACE 7
#define READ_UNVERIFIED 8
#define MARK_OF_THE_END 9
#define FAILED_SYNC_REPEATED 10
#define REOPENED_WHILE_BUSY 11
#define REFUSED_SLOT_KEPT 12
#define PRESENT_BLOCK_PUT_AGAIN 13

#ifndef BUG
#define BUG NO_BUG
#endif
#ifndef BLOCKS
#define BLOCKS 3            /* that lanes take, all in all */
#endif
#ifndef PURGES
#define PURGES 1
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef FAULTS
#define FAULTS 1            /* syncs that fail */
#endif
#ifndef AHEAD
#define AHEAD 1             /* slots that are reserved for later writes */
#endif
#ifndef READS
#define READS 1
#endif

#define PROCESSES 2
#define LANES 3             /* lanes 0 and 1 are of process 0, lane 2 of process 1 */
#define SLOTS 2
#define NAMES 3
#define NONE 15
#define PARENT 0
#define CHILD 1             /* of PARENT; further names stand alone */
#define PROCESS(lane) ((lane) / 2)
#define BYTES(name, mark) (1 + (name) * 4 + (mark))
#define JUNK 0

mtype = { FREE, RESERVED, HELD };

typedef Slot {
  mtype state = FREE;
  byte serial;              /* of the reservation, later of the entry */
  byte lane, epoch;         /* of the owner */
  byte cache[2];            /* what a read sees */
  byte medium[2]            /* what a loss of power leaves */
};
typedef Entry { byte slot = NONE; byte serial; byte mark };

Slot slots[2];
Entry index[3];
byte serial;
byte purges;                /* in the index: blocks taken before the last of them are dead */
bool killed[PROCESSES];
byte epoch[PROCESSES];      /* of the process's opening */
bool leaving[PROCESSES];    /* it has given the store up, and waits for its lanes */
byte kept[PROCESSES] = NONE, kept_serial[PROCESSES];  /* a slot that a lane reserved for a later write */
bool busy[LANES];           /* between taking a block and giving up its slot */
bool writing[LANES];        /* inside the kernel */
byte blocks = BLOCKS, kills = KILLS, faults = FAULTS, ahead = AHEAD;
byte ended;

#define HERE(name) (index[name].slot != NONE)
#define LACKS_PARENT(name) (name == CHILD && !(HERE(PARENT) && index[PARENT].mark >= purges))
#define LEAF(name) (HERE(name) && !(name == PARENT && HERE(CHILD)))
#define WRITING(process) (process == 0 -> writing[0] || writing[1] : writing[2])
#define BUSY(process) (process == 0 -> busy[0] || busy[1] : busy[2])

/* Whether the owner of a slot can write no more, as `asking` sees it. */
#define DEAD(s, asking) ( \
  PROCESS(slots[s].lane) == asking -> slots[s].epoch != epoch[asking] : \
  BUG == RECLAIMED_BY_AGE || \
  (killed[PROCESS(slots[s].lane)] && (BUG == RECLAIMED_WHILE_IN_THE_KERNEL || !WRITING(PROCESS(slots[s].lane)))) )

#define ABANDONED(s) ( \
  killed[PROCESS(slots[s].lane)] || leaving[PROCESS(slots[s].lane)] || \
  slots[s].epoch != epoch[PROCESS(slots[s].lane)] )

#define GOES_ON(me) (!killed[PROCESS(me)] && !leaving[PROCESS(me)])

inline whole() {
  byte n, s, count;
  n = 0;
  do
  :: n < NAMES ->
     if
     :: HERE(n) ->
        s = index[n].slot;
        assert(slots[s].state == HELD && slots[s].serial == index[n].serial);             /* COUNTED */
        assert(slots[s].cache[0] == BYTES(n, index[n].mark));                             /* INTACT */
        assert(slots[s].cache[1] == BYTES(n, index[n].mark));                             /* INTACT */
        assert(slots[s].medium[0] == BYTES(n, index[n].mark));                            /* INTACT */
        assert(slots[s].medium[1] == BYTES(n, index[n].mark));                            /* INTACT */
        assert(index[n].mark < purges || !LACKS_PARENT(n))                                /* CLOSED */
     :: else
     fi;
     n++
  :: else -> break
  od;
  count = 0;
  s = 0;
  do
  :: s < SLOTS -> count = count + (slots[s].state == HELD); s++
  :: else -> break
  od;
  n = 0;
  do
  :: n < NAMES -> count = count - HERE(n); n++
  :: else -> break
  od;
  assert(count == 0);                                                                     /* COUNTED */
  n = 0; s = 0
}

/* For the replay of a history: the state after a step. */
inline tell() {
  printf("= %d %d %d", index[0].slot, index[1].slot, index[2].slot);
  printf(" %e %e\n", slots[0].state, slots[1].state)
}

inline give(place) {
  slots[place].state = FREE; slots[place].serial = 0; slots[place].lane = 0; slots[place].epoch = 0;
  slots[place].medium[0] = JUNK; slots[place].medium[1] = JUNK
}

inline evict(name) {
  give(index[name].slot);
  index[name].slot = NONE; index[name].serial = 0; index[name].mark = 0
}

#define VICTIM(one, spared, also) (LEAF(one) && spared != one && also != one)

/* A slot for the lane, reserved: a free one, or that of a leaf which leaves for it; NONE if there is neither. `spared`
   and `also` do not leave. */
inline take(who, spared, also, out, got) {
  out = NONE;
  if
  :: slots[0].state == FREE -> out = 0
  :: slots[0].state != FREE && slots[1].state == FREE -> out = 1
  :: slots[0].state != FREE && slots[1].state != FREE ->
     if
     :: VICTIM(0, spared, also) -> out = index[0].slot; printf("evict 0\n"); evict(0)
     :: VICTIM(1, spared, also) -> out = index[1].slot; printf("evict 1\n"); evict(1)
     :: VICTIM(2, spared, also) -> out = index[2].slot; printf("evict 2\n"); evict(2)
     :: BUG == PARENT_EVICTED_FIRST && HERE(0) && spared != 0 -> out = index[0].slot; evict(0)
     :: !VICTIM(0, spared, also) && !VICTIM(1, spared, also) && !VICTIM(2, spared, also)
     fi
  fi;
  if
  :: out != NONE ->
     serial++;
     got = serial;
     slots[out].state = RESERVED; slots[out].serial = serial;
     slots[out].lane = who; slots[out].epoch = epoch[PROCESS(who)]
  :: else
  fi
}

#define OURS(s, number) (slots[s].state == RESERVED && slots[s].serial == number)

proctype Lane(byte me) {
  byte name, mark, slot = NONE, number;
next:
  atomic {
    busy[me] = false; name = 0; mark = 0; slot = NONE; number = 0;
    if
    :: killed[PROCESS(me)] || (blocks == 0 && !leaving[PROCESS(me)]) -> ended++; goto over
    :: blocks > 0 && GOES_ON(me) -> blocks--
    fi;
    if
    :: name = 0
    :: name = 1
    :: name = 2
    fi;
    busy[me] = true;
    mark = purges                                       /* the block's tokens are scheduled now */
  }
  if
  :: atomic {                                           /* a slot from an earlier transaction; one look at the index */
       GOES_ON(me) && kept[PROCESS(me)] != NONE && !HERE(name) && !LACKS_PARENT(name) && mark >= purges ->
       slot = kept[PROCESS(me)]; number = kept_serial[PROCESS(me)];
       kept[PROCESS(me)] = NONE; kept_serial[PROCESS(me)] = 0;
       printf("adopt %d %d %d\n", me, name, slot)
     }
  :: atomic {                                           /* a transaction */
       GOES_ON(me) ->
       if
       :: mark < purges || LACKS_PARENT(name) ->
          printf("reserve %d %d %d refused\n", me, name, mark); tell(); goto next
       :: mark >= purges && !LACKS_PARENT(name) && HERE(name) && index[name].mark >= purges ->
          printf("reserve %d %d %d present\n", me, name, mark); tell(); goto next
       :: else ->
          printf("reserve %d %d %d\n", me, name, mark);
          if
          :: HERE(name) -> evict(name)                  /* a dead block gives way to a new one */
          :: else
          fi;
          take(me, name, (name == CHILD -> PARENT : NONE), slot, number);
          printf("slot %d\n", slot); tell();
          if
          :: slot == NONE -> goto next
          :: else
          fi
       fi;
       whole();
       if
       :: BUG == PUBLISHED_BEFORE_WRITTEN -> goto publish
       :: BUG != PUBLISHED_BEFORE_WRITTEN
       fi
     }
  :: atomic { !GOES_ON(me) -> goto next }
  fi;
  atomic {
    if
    :: !GOES_ON(me) -> goto next
    :: GOES_ON(me)
    fi;
    assert(OURS(slot, number));                                                           /* OWNED */
    writing[me] = true; printf("write %d 1\n", me); slots[slot].cache[0] = BYTES(name, mark); whole()
  }
  atomic {
    assert(OURS(slot, number));                                                           /* OWNED */
    slots[slot].cache[1] = BYTES(name, mark); writing[me] = false; printf("write %d 0\n", me); whole();
    if
    :: BUG == PUBLISHED_BEFORE_SYNCED -> goto publish
    :: BUG != PUBLISHED_BEFORE_SYNCED
    fi
  }
  atomic {                                              /* fdatasync, shared or not, begun after the write */
    if
    :: !GOES_ON(me) -> goto next
    :: GOES_ON(me) ->
       slots[slot].medium[0] = slots[slot].cache[0]; slots[slot].medium[1] = slots[slot].cache[1]
    :: GOES_ON(me) && faults > 0 ->
       faults--; printf("fault %d\n", me);
       if
       :: BUG == FAILED_SYNC_REPEATED -> goto publish   /* the next call has nothing to write, and succeeds */
       :: BUG != FAILED_SYNC_REPEATED -> leaving[PROCESS(me)] = true; goto next
       fi
    fi
  }
publish:
  atomic {
    if
    :: !GOES_ON(me) -> goto next
    :: GOES_ON(me)
    fi;
    if
    :: !OURS(slot, number) -> printf("publish %d %d %d failed\n", me, name, mark)
    :: else ->
       if
       :: (purges > mark && BUG != MARK_OF_THE_END) || (LACKS_PARENT(name) && BUG != PARENT_UNCHECKED_AT_THE_END) ->
          printf("publish %d %d %d refused\n", me, name, mark);
          if
          :: BUG != REFUSED_SLOT_KEPT -> give(slot)
          :: BUG == REFUSED_SLOT_KEPT
          fi
       :: else ->
          if
          :: HERE(name) && index[name].mark >= purges && BUG != PRESENT_BLOCK_PUT_AGAIN ->
             printf("publish %d %d %d present\n", me, name, mark); give(slot)
          :: else ->
             printf("publish %d %d %d stored\n", me, name, mark);
             if
             :: HERE(name) && BUG != PRESENT_BLOCK_PUT_AGAIN -> evict(name)
             :: else
             fi;
             slots[slot].state = HELD; slots[slot].lane = 0; slots[slot].epoch = 0;
             index[name].slot = slot; index[name].serial = number;
             index[name].mark = (BUG == MARK_OF_THE_END -> purges : mark)
          fi
       fi
    fi;
    if
    :: kept[PROCESS(me)] == NONE && ahead > 0 ->
       ahead--; take(me, name, NONE, kept[PROCESS(me)], kept_serial[PROCESS(me)]);
       printf("keep %d\n", kept[PROCESS(me)])
    :: true                                             /* the write was no part of a stream */
    fi;
    tell(); whole();
    goto next
  }
over:
  skip
}

#define LOST(s, asking) (slots[s].state == RESERVED && DEAD(s, asking))

inline reclaim(asking) {                                /* a transaction */
  printf("reclaim %d\n", asking);
  if
  :: LOST(0, asking) -> give(0)
  :: else
  fi;
  if
  :: LOST(1, asking) -> give(1)
  :: else
  fi;
  tell()
}

/* Any process takes back the slots of dead owners, when it is opened and now and then. */
proctype Reclaim() {
end:
  do
  :: d_step { !killed[0] && (LOST(0, 0) || LOST(1, 0)) -> reclaim(0) }
  :: d_step { !killed[1] && (LOST(0, 1) || LOST(1, 1)) -> reclaim(1) }
  od
}

inline reopen(process) {
  leaving[process] = false; epoch[process]++;
  kept[process] = NONE; kept_serial[process] = 0;       /* the new owner takes it back */
  printf("reopen %d\n", process)
}

proctype Fate() {
end:
  do
  :: atomic { kills > 0 && ended < LANES -> kills--;
       if
       :: !killed[0] -> killed[0] = true; printf("kill 0\n")
       :: !killed[1] -> killed[1] = true; printf("kill 1\n")
       fi }
  :: atomic { kept[0] != NONE && GOES_ON(0) -> printf("free 0 %d\n", kept[0]); give(kept[0]); kept[0] = NONE;
       kept_serial[0] = 0; tell() }
  :: atomic { kept[1] != NONE && GOES_ON(2) -> printf("free 1 %d\n", kept[1]); give(kept[1]); kept[1] = NONE;
       kept_serial[1] = 0; tell() }
  :: atomic { leaving[0] && !killed[0] && (BUG == REOPENED_WHILE_BUSY || !BUSY(0)) -> reopen(0) }
  :: atomic { leaving[1] && !killed[1] && (BUG == REOPENED_WHILE_BUSY || !BUSY(1)) -> reopen(1) }
  :: atomic { purges < PURGES -> purges++; printf("purge\n") }
  :: atomic { purges && HERE(0) && index[0].mark < purges -> printf("remove 0\n"); evict(0); tell() }
  :: atomic { purges && HERE(1) && index[1].mark < purges -> printf("remove 1\n"); evict(1); tell() }
  :: atomic { purges && HERE(2) && index[2].mark < purges -> printf("remove 2\n"); evict(2); tell() }
  od
}

inline look_up(one) {                                   /* entry and tombstone, in one transaction */
  left--;
  name = one; before = purges;
  printf("look %d %d\n", name, index[name].mark >= purges);
  place = index[name].slot; number = index[name].serial; mark = index[name].mark;
  if
  :: mark < purges -> place = NONE
  :: else
  fi
}

#define SAME_WRITE(name, place, number) ( \
  HERE(name) && index[name].slot == place && (BUG == DAMAGE_BY_PLACE || index[name].serial == number) )

proctype Reader() {
  byte name, place, number, mark, first, second, before, left = READS;
end:
  do
  :: atomic { left && HERE(0) -> look_up(0); goto read }
  :: atomic { left && HERE(1) -> look_up(1); goto read }
  :: atomic { left && HERE(2) -> look_up(2); goto read }
  od;
read:
  if
  :: place == NONE
  :: place != NONE -> first = slots[place].cache[0]
  fi;
  atomic {
    if
    :: place == NONE -> skip
    :: place != NONE ->
       second = slots[place].cache[1];
       if
       :: BUG == READ_UNVERIFIED || (first == BYTES(name, mark) && second == BYTES(name, mark)) ->
          assert(first == BYTES(name, mark) && second == BYTES(name, mark));              /* SERVED */
          assert(mark >= before)                                                          /* SERVED */
       :: else -> printf("overtaken %d\n", name);        /* to look again: the same write, then it is damage */
          goto verify
       fi
    fi;
    name = 0; place = 0; number = 0; mark = 0; first = 0; second = 0; before = 0;
    goto end
  }
verify:
  atomic {
    assert(!SAME_WRITE(name, place, number));                                             /* SOUND */
    name = 0; place = 0; number = 0; mark = 0; first = 0; second = 0; before = 0;
    goto end
  }
}

/* When nothing moves any more, what is reserved is kept for later, or a dead owner's. */
proctype Audit() {
  ended == LANES && !writing[0] && !writing[1] && !writing[2];
  atomic {
    assert(slots[0].state != RESERVED || kept[0] == 0 || kept[1] == 0 || ABANDONED(0));   /* COUNTED */
    assert(slots[1].state != RESERVED || kept[0] == 1 || kept[1] == 1 || ABANDONED(1))    /* COUNTED */
  }
}

init {
  atomic {
    run Lane(0); run Lane(1); run Lane(2);
    run Reclaim(); run Fate(); run Reader(); run Audit()
  }
}
