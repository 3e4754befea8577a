/*
 * The search for a request that kills engines, for Spin: which requests a crash makes suspects, how
 * they are tried, and who is given up. README.md beside this file says what is left out.
 *
 * All state is in Redis, so a coordinator that takes over decides as the one before: there is no
 * coordinator here, only steps that any leader may take. A step is an `atomic` block; each names its
 * script, as in protocol.pml. Lanes, groups and their order are any that the scripts let through.
 *
 * Broken variants, each of which Spin must catch:
 *   -DIN_COMPANY  a crash with a group on trial counts as one that a request met alone
 *   -DONE_CRASH   one crash alone convicts
 *   -DCROWDED     a request that must run alone is put onto any lane
 *   -DNO_SPLIT    a group that crashed is tried again as it was
 */

#ifndef REQUESTS
#define REQUESTS 4
#endif
#ifndef POISONS
#define POISONS 1       /* requests that kill their engine, at any moment while they run */
#endif
#ifndef CHANCES
#define CHANCES 1       /* crashes that nobody causes; with fewer than it takes, nobody innocent ends */
#endif
#ifndef HASTE
#define HASTE 1         /* groups with a poison that are acquitted, since it had not killed yet */
#endif
#ifndef LOSSES
#define LOSSES 1        /* workers that are killed from outside */
#endif
#define WORKERS 2
#ifdef ONE_CRASH
#define ENOUGH 1
#else
#define ENOUGH 2        /* max_crashed_alone */
#endif
#define FREE 99         /* no suspect */
#define SAY printf
#define PROMISE(said, holds) if :: (holds) :: else -> SAY(said); assert(false) fi

mtype:state = { waiting, running, over };
mtype:mark = { unmarked, group, alone };

typedef Request {
  bit poison;
  mtype:state state = waiting;
  byte worker;
  byte trial = FREE;     /* most suspects of its next trial; 0: alone */
  bit tried;             /* it is on trial on its lane */
  byte crashed_alone;
}
typedef Worker {
  mtype:mark mark = unmarked;
  byte size;             /* of the group on trial */
  byte load;
}

Request request[REQUESTS];
Worker worker[WORKERS];
byte chances = CHANCES, haste = HASTE, losses = LOSSES, open = REQUESTS;
byte r, w, n, most;

#define runs_on(r, w) (request[r].state == running && request[r].worker == w)
#define is_tried(r) (request[r].state == waiting && request[r].trial > 0 && request[r].trial != FREE)

#ifdef NO_SPLIT
#define next_trial(n) ((n) <= 1 -> 0 : (n))
#else
#define next_trial(n) ((n) <= 1 -> 0 : ((n) / 2 > 0 -> (n) / 2 : 1))
#endif

#if REQUESTS == 3
#define SOME(is) (is(0) || is(1) || is(2))
#define PICK(r, is) if :: is(0) -> r = 0 :: is(1) -> r = 1 :: is(2) -> r = 2 fi
#else
#define SOME(is) (is(0) || is(1) || is(2) || is(3))
#define PICK(r, is) if :: is(0) -> r = 0 :: is(1) -> r = 1 :: is(2) -> r = 2 :: is(3) -> r = 3 fi
#endif

#define is_plain(r) (request[r].state == waiting && request[r].trial == FREE)
#define is_lonely(r) (request[r].state == waiting && request[r].trial == 0)
#define runs(r) (request[r].state == running && !request[r].poison)
#define PICK_WORKER(w, is) if :: is(0) -> w = 0 :: is(1) -> w = 1 fi
#define SOME_WORKER(is) (is(0) || is(1))
#define takes(w) (worker[w].mark == unmarked)
#ifdef CROWDED
#define is_empty(w) (worker[w].mark == unmarked)
#else
#define is_empty(w) (worker[w].mark == unmarked && worker[w].load == 0)
#endif
#define is_used(w) (worker[w].load > 0)
#define kills_on(r, w) (runs_on(r, w) && request[r].poison)
#define hides_on(r, w) (kills_on(r, w) && request[r].tried)
#if REQUESTS == 3
#define ANY(is, w) (is(0, w) || is(1, w) || is(2, w))
#else
#define ANY(is, w) (is(0, w) || is(1, w) || is(2, w) || is(3, w))
#endif
#define may_crash(w) (is_used(w) && (ANY(kills_on, w) || chances > 0))
#define may_survive(w) (worker[w].mark == group && (!ANY(hides_on, w) || haste > 0))

inline put(r, w, is_on_trial) {
  request[r].state = running;
  request[r].worker = w;
  request[r].tried = is_on_trial;
  worker[w].load++
}

inline give_back(r) {
  request[r].state = waiting;
  request[r].worker = 0;
  request[r].tried = 0
}

inline forget(w) {
  worker[w].mark = unmarked;
  worker[w].size = 0;
  worker[w].load = 0
}

inline end(r) {
  request[r].state = over;
  request[r].trial = FREE;
  request[r].tried = 0;
  request[r].worker = 0;
  request[r].crashed_alone = 0;
  open--
}

active proctype Yard() {
  atomic { /* Which of them are poison */
    n = 0;
    for (r : 0 .. REQUESTS - 1) {
      if
      :: n < POISONS -> request[r].poison = 1; n++
      :: true
      fi
    }
    n = 0; r = 0
  }
  do
  :: open == 0 -> break
  :: atomic { /* -- dispatch.lua, of what nobody suspects */
      SOME(is_plain) && SOME_WORKER(takes) ->
      PICK(r, is_plain);
      PICK_WORKER(w, takes);
      put(r, w, 0);
      SAY("%d runs on worker %d\n", r, w);
      r = 0; w = 0
    }
  :: atomic { /* -- dispatch.lua, of a group: the first that may, and any of the others */
      SOME(is_tried) && SOME_WORKER(takes) ->
      PICK_WORKER(w, takes);
      n = 0;
      most = FREE;
      for (r : 0 .. REQUESTS - 1) {
        if
        :: is_tried(r) && n < most && n < request[r].trial ->
          if
          :: true ->
            most = (request[r].trial < most -> request[r].trial : most);
            put(r, w, 1);
            n++;
            SAY("%d is on trial on worker %d\n", r, w)
          :: n > 0
          fi
        :: else
        fi
      }
      worker[w].mark = group;
      worker[w].size = n;
      n = 0; r = 0; w = 0; most = 0
    }
  :: atomic { /* -- dispatch.lua, of one that must run alone */
      SOME(is_lonely) && SOME_WORKER(is_empty) ->
      PICK(r, is_lonely);
      PICK_WORKER(w, is_empty);
      put(r, w, 1);
      worker[w].mark = alone;
      SAY("%d is alone on worker %d\n", r, w);
      r = 0; w = 0
    }
  :: atomic { /* -- acquit.lua */
      SOME_WORKER(may_survive) ->
      PICK_WORKER(w, may_survive);
      if
      :: ANY(hides_on, w) -> haste--
      :: else
      fi;
      for (r : 0 .. REQUESTS - 1) {
        if
        :: runs_on(r, w) && request[r].tried -> request[r].trial = FREE; request[r].tried = 0
        :: else
        fi
      }
      worker[w].mark = unmarked;
      worker[w].size = 0;
      SAY("the group on worker %d survives\n", w);
      r = 0; w = 0
    }
  :: atomic { /* -- finish.lua */
      SOME(runs) ->
      PICK(r, runs);
      w = request[r].worker;
      worker[w].load--;
      if
      :: worker[w].mark == alone && request[r].tried -> worker[w].mark = unmarked
      :: else
      fi;
      end(r);
      SAY("%d completes\n", r);
      r = 0; w = 0
    }
  :: atomic { /* -- retire.lua, crashed; rescue.lua; answer.lua for who is given up */
      SOME_WORKER(may_crash) ->
      PICK_WORKER(w, may_crash);
      if
      :: ANY(kills_on, w) -> SAY("worker %d crashes of a poison\n", w)
      :: else -> chances--; SAY("worker %d crashes by chance\n", w)
      fi;
      n = (worker[w].mark == group -> worker[w].size : worker[w].load);
      for (r : 0 .. REQUESTS - 1) {
        if
        :: runs_on(r, w) ->
          if
          :: worker[w].mark == alone && request[r].tried ->
            request[r].trial = 0;
            request[r].crashed_alone++
          :: worker[w].mark == group && request[r].tried ->
            request[r].trial = next_trial(n);
#ifdef IN_COMPANY
            request[r].crashed_alone++
#endif
          :: worker[w].mark == unmarked -> request[r].trial = next_trial(n)
          :: else
          fi;
          give_back(r);
          if
          :: request[r].crashed_alone >= ENOUGH ->
            SAY("%d is given up\n", r);
            PROMISE("an innocent was convicted\n", request[r].poison);
            end(r)
          :: else
          fi
        :: else
        fi
      }
      forget(w);
      n = 0; r = 0; w = 0
    }
  :: atomic { /* -- retire.lua, lost; rescue.lua: says nothing about anybody */
      losses > 0 && SOME_WORKER(is_used) ->
      PICK_WORKER(w, is_used);
      losses--;
      for (r : 0 .. REQUESTS - 1) {
        if
        :: runs_on(r, w) -> give_back(r)
        :: else
        fi
      }
      forget(w);
      SAY("worker %d is killed from outside\n", w);
      r = 0; w = 0
    }
  od
}
