/* Purges of one tenant over two replicas: the log in the bucket, and G2, G3 and G4 of a replica that serves. The other
   one computes and stores, too, and either may purge.

   A block is a number, in the order in which blocks were computed. A purge covers the blocks that were computed before it
   was asked for. The log gives it a number; a block carries the number of the last entry that was in force when it was
   taken over for writing, and is dead in G3 and in the bucket where a later entry is known. In G2 it has no number: what
   is there when an entry takes force is dropped, and refused if it comes up again.

   A replica lists the log now and then, has its entries take force in G2, then in G3, and counts on it from when the
   listing began. It may be restarted, cut off from the bucket, and its uploads may land at any later time. G3 may fail to
   take a purge. Time has ticks, each as long as the bound.

   A purge of this replica that cannot be written to the log raises, and is owed to it, over restarts, until an entry is
   written for it: then it counts as one that returned.

   Invariants:
     LEARNT   a replica serves nothing that a purge covers which had returned when the listing began that it counts on
     BOUND    `strict`: no replica serves a block later than one tick after the purge returned that covers it
     HONEST   a block never carries the number of an entry whose purge covers it

   BUG plants an error, which breaks one of them. */

#define NO_BUG 0
#define BUCKET_BY_CLOCK 1
#define NUMBER_BEFORE_DROP 2
#define NUMBER_AT_THE_LANDING 3
#define UNDER_WAY_PUBLISHED 4
#define FIRST_LOOK_TRUSTED 5
#define LEASE_FROM_THE_END 6
#define LEASE_UNCHECKED 7
#define RETURNED_UNWRITTEN 8
#define PROMOTED_LATE 9
#define NOTED_BEFORE_G3 10
#define SETTLED_BY_ANOTHERS 11

#ifndef BUG
#define BUG NO_BUG
#endif
#ifndef STRICT
#define STRICT 1
#endif
#ifndef BLOCKS
#define BLOCKS 1            /* that are computed, all in all */
#endif
#ifndef PURGES
#define PURGES 1
#endif
#ifndef TICKS
#define TICKS 2
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef REFUSALS
#define REFUSALS 1          /* purges that a G3 fails to take */
#endif

#define REPLICAS 2
#define NONE 0              /* no block; blocks count from 1 */

typedef Copy { byte block; byte number };

typedef Replica {
  byte ram;                 /* the block in G2 */
  byte refused;             /* blocks up to this one do not come into G2 */
  byte force;               /* number of the last entry in force in G2 */
  byte noted;               /* the same for the next process: the last that G3 has, too */
  Copy disk;
  byte disk_knows;          /* number of the last entry that G3 has */
  byte read;                /* of the last entry that G4's reader has read */
  bool looked;              /* since the start of the process: it is open */
  bool fresh;               /* the log was read since then */
  /* the listing under way */
  bool listing, answered, dropped, forced;
  byte listed, began, returned;
  /* the listing that it counts on */
  bool proven;
  byte proven_at, learnt;
  /* copies under way: into G3, into the bucket, up into G2 */
  Copy down, up;
  byte rising
};

Replica at[REPLICAS];
Copy unit;                  /* in the bucket */
byte entries;               /* in the log */
byte asked;                 /* purges that were asked for */
byte covers_of[PURGES + 1]; /* by entry: the last block that its purge covers */
byte returned;              /* the last block that some purge covers which has returned */
byte returned_at;
byte now, computed;
byte owed, owed_to;         /* 1 + the last block that a purge which raised covers; 0: none is owed. The expected number */
byte blocks = BLOCKS, restarts = RESTARTS, refusals = REFUSALS;

#define LEASED(r) (at[r].proven && now - at[r].proven_at <= 1)
#define OPEN(r) (at[r].looked && (!STRICT || LEASED(r) || BUG == LEASE_UNCHECKED))

inline honest() {
  byte n;
  n = 1;
  do
  :: n <= entries ->
     assert(unit.block == NONE || unit.number < n || covers_of[n] < unit.block);            /* HONEST */
     assert(at[0].disk.block == NONE || at[0].disk.number < n || covers_of[n] < at[0].disk.block);    /* HONEST */
     n++
  :: else -> break
  od;
  n = 0
}

/* What is in G2, and on its way there, goes; blocks until now do not come up again. */
inline drop(r) {
  at[r].ram = NONE; at[r].refused = computed;
  if
  :: BUG == UNDER_WAY_PUBLISHED
  :: BUG != UNDER_WAY_PUBLISHED -> at[r].rising = NONE
  fi
}

proctype Work(byte r) {
end:
  do
  :: d_step { OPEN(r) && at[r].ram == NONE && blocks > 0 ->                     /* compute */
       blocks--; computed++; at[r].ram = computed }
  :: d_step { at[r].ram != NONE && OPEN(r) ->                                   /* serve */
       assert(at[r].ram > at[r].learnt);                                                    /* LEARNT */
       assert(!STRICT || at[r].ram > returned || now <= returned_at + 1);                   /* BOUND */
       skip }
  :: d_step { at[r].ram != NONE -> at[r].ram = NONE }                           /* evict */
  :: d_step { at[r].ram != NONE && at[r].looked && at[r].down.block == NONE ->  /* take over for G3 */
       at[r].down.block = at[r].ram; at[r].down.number = at[r].force }
  :: d_step { at[r].down.block != NONE ->                                       /* publish there */
       if
       :: at[r].down.number < at[r].disk_knows && BUG != NUMBER_AT_THE_LANDING -> skip
       :: else ->
          at[r].disk.block = at[r].down.block; at[r].disk.number = at[r].down.number;
          if
          :: BUG == NUMBER_AT_THE_LANDING -> at[r].disk.number = at[r].force
          :: else
          fi
       fi;
       at[r].down.block = NONE; at[r].down.number = 0; honest() }
  :: d_step { at[r].ram != NONE && at[r].looked && at[r].up.block == NONE ->    /* take over for the bucket */
       at[r].up.block = at[r].ram; at[r].up.number = at[r].force }
  :: d_step { at[r].up.block != NONE ->                                         /* land, at some time; create-only */
       if
       :: unit.block == NONE -> unit.block = at[r].up.block; unit.number = at[r].up.number
       :: else
       fi;
       at[r].up.block = NONE; at[r].up.number = 0; honest() }
  :: d_step { OPEN(r) && at[r].rising == NONE && at[r].disk.block != NONE &&    /* read from G3 */
       at[r].disk.number >= at[r].disk_knows -> at[r].rising = at[r].disk.block }
  :: d_step { OPEN(r) && at[r].fresh && at[r].rising == NONE && unit.block != NONE &&     /* from the bucket */
       (unit.number >= at[r].read || BUG == BUCKET_BY_CLOCK) -> at[r].rising = unit.block }
  :: d_step { at[r].rising != NONE ->                                           /* publish in G2 */
       if
       :: at[r].ram == NONE && (at[r].rising > at[r].refused || BUG == PROMOTED_LATE ||
          BUG == UNDER_WAY_PUBLISHED || BUG == BUCKET_BY_CLOCK) -> at[r].ram = at[r].rising
       :: else
       fi;
       at[r].rising = NONE }
  :: d_step { at[r].fresh && unit.block != NONE && unit.number < at[r].read ->  /* sweep */
       unit.block = NONE; unit.number = 0 }
  od
}

/* Housekeeping, and the first look at the start. */
proctype Look(byte r) {
end:
  do
  :: d_step { !at[r].looked && !at[r].listing -> at[r].looked = true }          /* it opens without the bucket */
  :: d_step { !at[r].listing ->
       at[r].listing = true; at[r].began = now; at[r].listed = entries; at[r].returned = returned }
  :: d_step { at[r].listing && !at[r].answered ->
       at[r].answered = true; at[r].fresh = true;
       if
       :: at[r].listed > at[r].read -> at[r].read = at[r].listed
       :: else
       fi;
       if
       :: BUG == LEASE_FROM_THE_END -> at[r].began = now
       :: else
       fi;
       if
       :: BUG == NUMBER_BEFORE_DROP && at[r].listed > at[r].force -> at[r].force = at[r].listed
       :: else
       fi }
  :: d_step { at[r].answered && !at[r].dropped ->
       at[r].dropped = true;
       if
       :: (at[r].listed > at[r].force || BUG == NUMBER_BEFORE_DROP) && (at[r].looked || at[r].force > 0) -> drop(r)
       :: else
       fi }
  :: d_step { at[r].dropped && !at[r].forced ->
       at[r].forced = true;
       if
       :: at[r].listed > at[r].force -> at[r].force = at[r].listed
       :: else
       fi }
  :: atomic { at[r].forced ->
       if
       :: at[r].listed > at[r].disk_knows -> at[r].disk_knows = at[r].listed
       :: at[r].listed > at[r].disk_knows && refusals > 0 ->                    /* G3 fails: it is asked again */
          refusals--;
          if
          :: !at[r].looked && BUG != FIRST_LOOK_TRUSTED -> drop(r)
          :: else
          fi
       :: at[r].listed <= at[r].disk_knows
       fi;
       if
       :: at[r].listed <= at[r].disk_knows || BUG == NOTED_BEFORE_G3 -> at[r].noted = at[r].force
       :: else
       fi;
       at[r].looked = true;
       at[r].proven = true; at[r].proven_at = at[r].began; at[r].learnt = at[r].returned;
       at[r].listing = false; at[r].answered = false; at[r].dropped = false; at[r].forced = false;
       at[r].listed = 0; at[r].began = 0; at[r].returned = 0 }
  od
}

/* The other replica: what it serves is as here. */
proctype Other() {
end:
  do
  :: d_step { blocks > 0 && at[1].ram == NONE -> blocks--; computed++; at[1].ram = computed }
  :: d_step { at[1].ram != NONE && at[1].up.block == NONE ->
       at[1].up.block = at[1].ram; at[1].up.number = at[1].force; at[1].ram = NONE }
  :: d_step { at[1].up.block != NONE ->                                         /* land, at some time; create-only */
       if
       :: unit.block == NONE -> unit.block = at[1].up.block; unit.number = at[1].up.number
       :: else
       fi;
       at[1].up.block = NONE; at[1].up.number = 0; honest() }
  :: d_step { entries > at[1].force -> at[1].ram = NONE; at[1].force = entries }
  od
}

/* The call of a purge, on either replica. */
proctype Purge() {
  byte r, upto, number;
end:
  do
  :: atomic { asked < PURGES && at[0].looked -> r = 0; asked++; upto = computed; drop(0); goto append }
  :: atomic { asked < PURGES -> r = 1; asked++; upto = computed; at[1].ram = NONE; goto append }
  od;
append:
  if
  :: atomic { true ->                                   /* read what others wrote, then the next number */
       number = entries + 1;
       entries = number; covers_of[number] = upto; at[r].read = number;
       honest() }
  :: atomic { true ->                                   /* it raises: the bucket cannot be reached */
       if
       :: BUG == RETURNED_UNWRITTEN
       :: BUG != RETURNED_UNWRITTEN ->
          if
          :: r == 0 -> owed = upto + 1; owed_to = at[0].read + 1
          :: else
          fi;
          upto = 0; number = 0; r = 0; goto end
       fi }
  fi;
  atomic {                                              /* it returns; its G3 has it, too */
    if
    :: number > at[r].disk_knows -> at[r].disk_knows = number
    :: else
    fi;
    if
    :: upto > returned -> returned = upto; returned_at = now
    :: else
    fi;
    upto = 0; number = 0; r = 0;
    goto end
  }
}

/* A purge that raised is tried again. */
inline settle() {
  if
  :: owed - 1 > returned -> returned = owed - 1; returned_at = now
  :: else
  fi;
  owed = 0; owed_to = 0
}

proctype Again() {
end:
  do
  :: d_step { owed > 0 && at[0].looked ->
       entries++; covers_of[entries] = owed - 1; at[0].read = entries; honest(); settle() }
  :: d_step { BUG == SETTLED_BY_ANOTHERS && owed > 0 && at[0].read >= owed_to -> settle() }
  od
}

/* Ends at once; what is on disk stays, and what was noted of the log. */
inline restart(r) {
  at[r].ram = NONE; at[r].rising = NONE; at[r].down.block = NONE; at[r].down.number = 0;
  at[r].force = at[r].noted; at[r].refused = 0; at[r].read = 0; at[r].looked = false; at[r].fresh = false; at[r].proven = false; at[r].proven_at = 0;
  at[r].learnt = 0;
  at[r].listing = false; at[r].answered = false; at[r].dropped = false; at[r].forced = false;
  at[r].listed = 0; at[r].began = 0; at[r].returned = 0
}

proctype World() {
end:
  do
  :: d_step { now < TICKS -> now++ }
  :: d_step { restarts > 0 -> restarts--; restart(0) }
  od
}

init {
  atomic { run Work(0); run Look(0); run Other(); run Purge(); run Again(); run World() }
}
