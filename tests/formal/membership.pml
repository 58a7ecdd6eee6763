/* The membership protocol (recover_megatron/membership) for exhaustive checking with spin.

   Two candidate coordinators, N workers, W of which have a launcher (witness) of their own. The run begins in a formed
   epoch 1 under candidate 0. Then, in any order and at any moment: workers die, a coordinator dies, a coordinator takes a
   worker for lost that is not, a worker or witness turns away from a coordinator that lives (both together: every partition),
   messages are late or lost with their connection.

   What a coordinator sends is its log; each follower reads it in order, as late as it likes, or never. What a worker sends is
   taken in at once, but acted on at any later time, which covers every delay of it.

   With -DPARTITION those of LEAVERS do not come back to candidate 0: the link is cut for good.

   Idle members (spares) are not told apart: an idle member is one that has reported every iteration of its epoch (dn), which is how
   commits treat it. The code differs in one case: where a new coordinator reaches idle members alone it commits nothing for what
   they "reported". If all others are gone, an iteration that only they knew to be committed is decided again (below, read "any
   member with a part" for "any member"); if one of them may be running it does not go on (quorum.can_tell). That rule is not in the
   model: the simulation in tests/membership checks it, and that leaving it out is found. Giving up and last words only stop a
   coordinator, as a lost quorum does.

   A worker's death can be told by its launcher (W) at any time after it, also before its connection to the same or the other
   coordinator is seen to end. A coordinator that is told closes that connection and reads nothing more of it: what was under way on
   it counts as never sent. What was under way to the other one was taken in before the death, and is acted on later. A worker with a
   launcher may finish the one thing that it was doing when it died (last): one done, join or attach that is taken in by a coordinator
   at any time after the death, also after the launcher's word. Without a launcher that would be no case of its own: the end of the
   same connection comes after it.

   With -DLEASE coordinators follow quorum.standing instead of the plain majority, and whoever may only claim asks for the lease
   (lease.py): a claim is taken or refused in one step, as late as one likes, and may be taken when its rendezvous is over.

   Budgets (-D): DEATHS of workers, CRASHES of candidate 0, SUSPICIONS that are wrong, ABANDONS of a live coordinator.
   Mutants (-D), each must be found: NOQUORUM, TIE, NOACK, NOOPENED, SAMENUMBER, MAJORITYCOMMIT, NOINFERENCE, DEAF (nobody is asked
   whether it has heard), ALIVE (a launcher's word is believed though the worker lives and goes on); with LEASE: HALF (half is enough without asking), NOHEIRS (who has no member of the holder may take it), UNASKED (no claim is
   made).

   Checked: no epoch number is formed twice; epochs, in the order of their numbers, are each part of the one before, as long as
   anybody of that lives (one lineage); a committed iteration is in every later plan, as long as any member of the epoch that committed it
   lives; nothing is committed in an epoch after a later one was formed; when others abort what was under way in an epoch (all have
   heard), no worker that its coordinator counts on takes it to go on, and one that does, in touch with its coordinator, is in no
   later epoch with a living member of the newest (HEARING); and, when nothing can happen any more,
   no worker of a majority that reaches a live candidate is left waiting. */

#ifndef N
#define N 3
#endif
#ifndef W
#define W 0
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef SUSPICIONS
#define SUSPICIONS 1
#endif
#ifndef ABANDONS
#define ABANDONS 1
#endif
#ifndef LEAVERS
#define LEAVERS 255             /* who may turn away */
#endif
#ifndef MORTALS
#define MORTALS 15              /* which workers may die */
#endif
#ifndef LASTS
#define LASTS ((1 << W) - 1)    /* which workers may finish what they were doing when they died */
#endif
#ifndef STEPS
#define STEPS 1
#endif

#ifdef PARTITION
#define CUT(c, g) (c == 0 && (LEAVERS & BIT(g)))
#else
#define CUT(c, g) 0
#endif

#define F (N + W)               /* followers: workers, then witnesses */
#define ALL ((1 << N) - 1)
#define NONE 7
#define MAXE 7                  /* epoch numbers */
#define LOG 9                   /* entries of one coordinator's log */
#define BIT(w) (1 << (w))
#ifdef HALF
#define MOST(a, b) (2 * (a) >= (b))
#else
#define MOST(a, b) (2 * (a) > (b))
#endif
#define COUNT(m) (((m) & 1) + (((m) >> 1) & 1) + (((m) >> 2) & 1) + (((m) >> 3) & 1))
#define MAX(a, b) ((a) > (b) -> (a) : (b))

#define STANDBY 0
#define RENDEZVOUS 1
#define STEADY 2
#define STOPPED 3

#define REVOKE 1
#define PLAN 2
#define COMMIT 3

/* the real world */
byte alive = ALL; byte out = 0;
byte last = 0;                  /* dead workers that may yet finish the one thing that they were doing */
byte deaths = DEATHS; byte crashes = CRASHES; byte suspicions = SUSPICIONS; byte abandons = ABANDONS;

/* followers */
byte att[F]; byte ptr[F]; byte term[F] = 1; byte fE[F] = 1; byte fM[F] = ALL;
byte oE[F]; byte oM[F]; byte oT[F]; byte dn[N]; byte cm[N];

/* coordinators */
bit up[2] = 1; byte st[2]; byte T[2]; byte cE[2]; byte cM[2]; byte bE[2]; byte bM[2]; bit own[2];
byte ex[2]; byte dead[2]; byte comm[2]; byte dk[2 * N]; byte jn[2]; byte ack[2]; bit dirty[2]; byte maxE[2];
byte evO[MAXE + 1];             /* presented to candidate 1: rendezvous opened by candidate 0 */
byte hd[2]; byte td[2];         /* who has told c that the epoch bE[c] is over; where in its log c tells that all have */
byte sent[2]; byte rev[2]; byte lk[2 * LOG]; byte le[2 * LOG]; byte lm[2 * LOG]; byte lc[2 * LOG];

/* ghosts: what was formed and committed by anybody */
byte gE = 1; byte gM = ALL; byte gT = 1; byte formedBefore[MAXE + 1]; byte gC = 0; byte gCM = 0;
byte gB = 0;                    /* living workers that took their epoch to go on when others aborted */

bit tried[2];                   /* c may not go on as things are */
byte f, w, e, x, living, ok;    /* scratch, zero between steps */

#define TOO_FEW 0
#define ENOUGH 1
#define CLAIM 2                 /* only with the lease */

#ifdef LEASE
byte hT, hM;                    /* the lease's holder: term and members; 0: nobody has had it */
byte qE[2]; byte qM[2];         /* what c has asked for last, and has no answer to: epoch and members */
byte granted[2];                /* the epoch for which c has it */
#define HEARING 0               /* there would be too many states */
#else
#define HEARING (W == 0)
#endif

inline append(c, kind, number, mask, commit) {
    lk[c * LOG + sent[c]] = kind; le[c * LOG + sent[c]] = number; lm[c * LOG + sent[c]] = mask;
    lc[c * LOG + sent[c]] = commit; sent[c] = sent[c] + 1
}

/* ok = cM[c] may be formed by c as far as base `m` is concerned */
inline majority(c, m, reached) {
    living = (m) & (ALL - dead[c]);
#ifdef LEASE
    if
    :: (living & (ALL - (reached))) == 0 || MOST(COUNT((reached) & living), COUNT(m))
    :: else ->
        if
        :: ((reached) & living) == 0 || 2 * COUNT(living & (ALL - (reached))) > COUNT(m) -> ok = TOO_FEW
        :: else -> ok = (ok == TOO_FEW -> TOO_FEW : CLAIM)
        fi
    fi
#else
#ifdef NOQUORUM
    ok = ok
#else
#ifdef TIE
    ok = ok && (2 * COUNT((reached) & living) >= COUNT(living))
#else
    ok = ok && (living == 0 || 2 * COUNT((reached) & living) > COUNT(living) ||
                (own[c] && 2 * COUNT((reached) & living) >= COUNT(living)))
#endif
#endif
#endif
}

inline quorum(c, reached) {
    ok = 1;
    majority(c, bM[c], reached);
#ifndef NOOPENED
    if
    :: !own[c] -> e = bE[c] + 1;
        do
        :: e <= MAXE && evO[e] != 0 -> majority(c, evO[e], reached); e++
        :: e <= MAXE && evO[e] == 0 -> e++
        :: e > MAXE -> break
        od
    :: else
    fi
#endif
}

/* x = everybody the new epoch may have to account for */
inline everybody(c) {
    x = bM[c];
    if
    :: !own[c] -> e = bE[c] + 1;
        do
        :: e <= MAXE -> x = x | evO[e]; e++
        :: else -> break
        od
    :: else
    fi
}

inline take_target(c) {         /* x = whom the run counts on */
    x = bM[c];
    if
    :: !own[c] -> e = bE[c] + 1;
        do
        :: e <= MAXE && evO[e] != 0 -> x = evO[e]; e++
        :: e <= MAXE && evO[e] == 0 -> e++
        :: e > MAXE -> break
        od
    :: else
    fi
}

#define TURNED(c, g) ((cM[c] & alive & BIT(g)) && term[g] > T[c])    /* so that nobody goes on with this plan */

inline check_formed(c) {
    assert(!formedBefore[cE[c]]);
    formedBefore[cE[c]] = 1;
    if
    :: cE[c] < gE || T[c] < gT ->
        /* A plan that its coordinator fixes late: all had joined it before they turned to the next coordinator, so
           it comes before the newest epoch, and must fit in there. */
        assert(cE[c] < gE && T[c] < gT && (gM & alive & (ALL - cM[c])) == 0 && comm[c] <= gC)
    :: else ->
        assert((cM[c] & (ALL - gM)) == 0 || (gM & alive) == 0);
        assert((cM[c] & gB) == 0 || (gM & alive & (ALL - gB)) == 0 || TURNED(c, 0) || TURNED(c, 1) || TURNED(c, 2) || TURNED(c, (N - 1)));
        assert(comm[c] >= gC || (gCM & alive) == 0);
        gE = cE[c]; gM = cM[c]; gT = T[c]
    fi
}

inline smallest_done(c, m) {    /* x */
    x = 255; w = 0;
    do
    :: w < N && (m & BIT(w)) -> x = (dk[c * N + w] < x -> dk[c * N + w] : x); w++
    :: w < N && !(m & BIT(w)) -> w++
    :: w >= N -> break
    od; w = 0
}

inline attach(c) {
    att[f] = c;
    if
    :: st[c] == STANDBY || st[c] == RENDEZVOUS && !own[c] ->
        if
        :: fE[f] > bE[c] -> bE[c] = fE[f]; bM[c] = fM[f]; dirty[c] = (st[c] == RENDEZVOUS)
        :: else
        fi;
        if
        :: oE[f] != 0 && oT[f] == 1 && evO[oE[f]] == 0 -> evO[oE[f]] = oM[f]; dirty[c] = (st[c] == RENDEZVOUS)
        :: else
        fi;
#ifndef SAMENUMBER
        maxE[c] = MAX(maxE[c], oE[f]);
#endif
        maxE[c] = MAX(maxE[c], fE[f])
    :: else
    fi;
    if
    :: f < N -> dk[c * N + f] = dn[f]; comm[c] = MAX(comm[c], cm[f]); jn[c] = jn[c] & (ALL - BIT(f))
    :: else -> ack[c] = ack[c] & (ALL - BIT(f - N))
    fi;
    ptr[f] = (st[c] == STANDBY -> sent[c] : rev[c]);
    dirty[c] = dirty[c] || (st[c] == STEADY && f < N)
}

inline receive(c) {
    x = c * LOG + ptr[f]; ptr[f] = ptr[f] + 1;
    if
    :: lk[x] == REVOKE && T[c] >= term[f] && (f >= N || (lm[x] & BIT(f))) ->
        term[f] = T[c]; oE[f] = le[x]; oM[f] = lm[x]; oT[f] = T[c];
        if
        :: f >= N && st[c] == RENDEZVOUS && up[c] && cE[c] == le[x] -> ack[c] = ack[c] | BIT(f - N)
        :: HEARING && f < N && up[c] && le[x] > bE[c] -> hd[c] = hd[c] | BIT(f)
        :: else
        fi
    :: lk[x] == PLAN && oE[f] == le[x] && oT[f] == T[c] ->
        fE[f] = le[x]; fM[f] = lm[x]; oE[f] = 0; oM[f] = 0; oT[f] = 0;
        if
        :: f < N -> cm[f] = MAX(cm[f], lc[x])
        :: else
        fi
    :: lk[x] == COMMIT && f < N && fE[f] == le[x] && oE[f] == 0 -> cm[f] = MAX(cm[f], lc[x])
    :: else
    fi;
    x = 0
}

#define LEADS(c) (up[c] && (st[c] == RENDEZVOUS || st[c] == STEADY))
#define MEMBERS(c) (st[c] == STEADY -> bM[c] : cM[c])
#define LIVE(c) (ALL - (dead[c] | ex[c]))
#define ROOM(c) (sent[c] < LOG - 1 && maxE[c] < MAXE)
#define RUNS(g) ((g) >= N || ((alive & BIT(g)) && !(out & BIT(g))))
#define ATTACHED(c, g) ((g) < N && att[g] == (c) -> BIT(g) : 0)

/* What cannot matter any more is made equal, to keep the number of states down. */
inline forget(g) {
    ptr[g] = 0; term[g] = 0; fE[g] = 0; fM[g] = 0; oE[g] = 0; oM[g] = 0; oT[g] = 0;
    if
    :: g < N -> dn[g] = 0; cm[g] = 0; gB = gB & (ALL - BIT(g))
    :: else
    fi
}

inline forget_evidence(c) {
    e = 0;
    do
    :: c == 1 && e <= MAXE -> evO[e] = 0; e++
    :: else -> break
    od;
    e = 0
}

/* Something changed that may let coordinator c go on where it could not before. */
#define RETRY(c) tried[c] = 0

#define FAULTS(g) \
    :: deaths > 0 && (MORTALS & BIT(g)) && (alive & BIT(g)) -> d_step { deaths--; alive = alive & (ALL - BIT(g)); forget(g) } \
    :: deaths > 0 && (MORTALS & LASTS & BIT(g)) && RUNS(g) && g < W -> \
        d_step { deaths--; alive = alive & (ALL - BIT(g)); last = last | BIT(g) }

/* Also a worker that has died, once. Then what it knew cannot matter any more; its connection stands until it is seen to
   have ended (WORKER), or its coordinator closes it. */
#define ACTS(g) (RUNS(g) || ((g) < N && (last & BIT(g))))

inline acted(g) {
    if
    :: g < N && (last & BIT(g)) -> last = last & (ALL - BIT(g)); forget(g)
    :: else
    fi
}

#define BETWEEN(c, g) \
    :: abandons > 0 && (LEAVERS & BIT(g)) && RUNS(g) && att[g] == c && up[c] && st[c] != STOPPED && !(g < N && (ex[c] & BIT(g))) -> \
        d_step { abandons--; att[g] = NONE } \
    :: RUNS(g) && att[g] == c && ptr[g] < sent[c] && !(g < N && (ex[c] & BIT(g))) -> \
        d_step { f = g; receive(c); RETRY(c); f = 0 } \
    :: RUNS(g) && att[g] == c && (!up[c] || st[c] == STOPPED) -> d_step { att[g] = NONE } \
    :: ACTS(g) && att[g] == NONE && up[c] && st[c] != STOPPED && !CUT(c, g) && (st[c] == STANDBY || term[g] <= T[c]) -> \
        d_step { \
            f = g; \
            if \
            :: f < N && ((ex[c] | dead[c]) & BIT(f)) -> out = out | BIT(f); forget(f) \
            :: else -> attach(c); RETRY(c) \
            fi; \
            acted(g); \
            f = 0 \
        } \
    :: RUNS(g) && att[g] == 1 - c && up[1 - c] && st[1 - c] == STANDBY && LEADS(c) -> d_step { att[g] = NONE }

#define ENDED(g) !(alive & BIT(g))
#ifdef ALIVE
#define SAID_DEAD(g) (ENDED(g) || g < W && RUNS(g))
#else
#define SAID_DEAD(g) ENDED(g)
#endif

#define WORKER(c, g) \
    :: suspicions > 0 && LEADS(c) && (MEMBERS(c) & LIVE(c) & BIT(g)) && att[g] == c && (alive & BIT(g)) && ROOM(c) -> \
        d_step { suspicions--; ex[c] = ex[c] | BIT(g); dirty[c] = 1 } \
    :: RUNS(g) && att[g] == c && up[c] && (ex[c] & BIT(g)) -> d_step { out = out | BIT(g); att[g] = NONE; forget(g) } \
    :: ACTS(g) && att[g] == c && up[c] && st[c] == RENDEZVOUS && oE[g] == cE[c] && oT[g] == T[c] && \
       !(jn[c] & BIT(g)) && (cM[c] & BIT(g)) -> \
        d_step { jn[c] = jn[c] | BIT(g); dk[c * N + g] = dn[g]; RETRY(c); acted(g) } \
    :: up[c] && SAID_DEAD(g) && !(dead[c] & BIT(g)) && st[c] != STOPPED && \
       ((ENDED(g) && att[g] == c && !(ex[c] & BIT(g))) || (g < W && att[(g < W -> N + g : 0)] == c)) -> \
        d_step { \
            dirty[c] = dirty[c] || (LEADS(c) && !(ex[c] & BIT(g))); \
            dead[c] = dead[c] | BIT(g); ex[c] = ex[c] & (ALL - BIT(g)); RETRY(c); \
            if \
            :: att[g] == c -> att[g] = NONE \
            :: else \
            fi \
        } \
    :: LEADS(c) && (MEMBERS(c) & LIVE(c) & BIT(g)) && att[g] != c && !dirty[c] -> \
        d_step { ex[c] = ex[c] | BIT(g); dirty[c] = 1 }

#define DONE(g) \
    :: ACTS(g) && oE[g] == 0 && dn[g] == cm[g] && dn[g] < STEPS -> \
        d_step { \
            dn[g] = dn[g] + 1; \
            if \
            :: att[g] != NONE -> \
                if \
                :: up[att[g]] && st[att[g]] == STEADY && bE[att[g]] == fE[g] -> dk[att[g] * N + g] = dn[g] \
                :: else \
                fi \
            :: else \
            fi; \
            acted(g) \
        }

#define READY(c, g) (g >= N || !(bM[c] & BIT(g)) || dk[c * N + g] > comm[c])

#define COORDINATOR(c) \
    :: LEADS(c) && dirty[c] && ROOM(c) -> d_step { reopen(c) } \
    :: up[c] && st[c] == RENDEZVOUS && !dirty[c] && jn[c] == cM[c] && sent[c] < LOG && !tried[c] -> d_step { form(c) } \
    :: up[c] && st[c] == STEADY && sent[c] < LOG && COMMITTABLE(c) -> d_step { commit(c) }

#ifdef MAJORITYCOMMIT
#define COMMITTABLE(c) (2 * ((dk[c * N] > comm[c]) + (dk[c * N + 1] > comm[c]) + (dk[c * N + 2] > comm[c])) > N)
#else
#if N == 4
#define COMMITTABLE(c) (READY(c, 0) && READY(c, 1) && READY(c, 2) && READY(c, 3))
#else
#define COMMITTABLE(c) (READY(c, 0) && READY(c, 1) && READY(c, 2))
#endif
#endif

inline reopen(c) {
    take_target(c);
    if
    :: !own[c] -> ex[c] = ex[c] | (ALL & (ALL - x) & (ALL - dead[c]))
    :: else
    fi;
    x = x & LIVE(c); dirty[c] = 0; jn[c] = 0; ack[c] = 0; RETRY(c);
    if
    :: x == 0 -> st[c] = STOPPED
    :: else ->
        maxE[c] = maxE[c] + 1; cE[c] = maxE[c]; cM[c] = x; st[c] = RENDEZVOUS;
        rev[c] = sent[c];
        append(c, REVOKE, cE[c], cM[c], 0)
    fi;
    x = 0; e = 0
}

#ifdef LEASE
/* It is asked for when all have joined; ok = whether it is granted to this rendezvous. */
inline claim(c) {
    if
    :: ok == CLAIM && granted[c] != cE[c] -> ok = 0; qE[c] = cE[c]; qM[c] = cM[c]
    :: else
    fi
}

#ifdef NOHEIRS
#define HEIR(c) 1
#else
#define HEIR(c) (qM[c] & hM)
#endif
#define MAY_TAKE(c) (hT == 0 || T[c] >= hT && HEIR(c))

inline take_lease(c) {
    if
    :: MAY_TAKE(c) ->
        hT = T[c]; hM = qM[c];
        if
        :: up[c] && cE[c] == qE[c] -> granted[c] = qE[c]; RETRY(c)
        :: else
        fi
    :: else ->
        if
        :: up[c] && st[c] == RENDEZVOUS && cE[c] == qE[c] -> st[c] = STOPPED
        :: else
        fi
    fi;
    qE[c] = 0; qM[c] = 0
}
#endif

/* ok: the next epoch may be formed of cM[c]; x = 0: it never will */
inline may_follow(c) {
    everybody(c);
    x = x & (ALL - dead[c]) & (ALL - cM[c]);
    if
    :: x == 0 -> ok = 1; x = 1
    :: else -> quorum(c, cM[c]);
        x = (ok != TOO_FEW);    /* 0: may never go on */
#ifndef NOACK
        ok = ((cM[c] & (BIT(W) - 1) & (ALL - ack[c])) == 0 -> ok : 0);
#endif
#ifdef LEASE
#ifndef UNASKED
        claim(c)
#endif
#endif
    fi
}

#define BELIEVES(c, g) (RUNS(g) && term[g] == att[g] + 1 && oE[g] == 0 && fE[g] <= bE[c] -> BIT(g) : 0)
#define BELIEVERS(c) (BELIEVES(c, 0) | BELIEVES(c, 1) | BELIEVES(c, 2) | BELIEVES(c, (N - 1)))
#define ABORTS(c, g) (RUNS(g) && att[g] == c && ptr[g] >= td[c])
#ifdef DEAF
#define ALL_HEARD(c) 1
#else
#define ALL_HEARD(c) (bM[c] & LIVE(c) & (ALL - hd[c])) == 0
#endif

#define HEAR(c) \
    :: HEARING && up[c] && st[c] == RENDEZVOUS && !dirty[c] && !td[c] && !tried[c] && ALL_HEARD(c) -> d_step { tell(c) } \
    :: td[c] && (BELIEVERS(c) & (ALL - gB)) && (ABORTS(c, 0) || ABORTS(c, 1) || ABORTS(c, 2) || ABORTS(c, (N - 1))) -> \
        d_step { gB = gB | BELIEVERS(c) }

inline tell(c) {
    may_follow(c);
    if
    :: ok || ex[c] == 0 -> td[c] = sent[c]; assert((BELIEVERS(c) & (ALL - ex[c])) == 0)
    :: !ok && ex[c] != 0 && x == 0 -> st[c] = STOPPED
    :: !ok && ex[c] != 0 && x != 0 -> tried[c] = 1
    fi;
    ok = 0; x = 0; e = 0; living = 0
}

inline form(c) {
    may_follow(c);
    if
    :: ok ->
        smallest_done(c, cM[c]);
#ifdef NOINFERENCE
        x = 0;
#endif
        comm[c] = MAX(comm[c], x);
        check_formed(c);
        if
        :: comm[c] > gC -> gC = comm[c]; gCM = cM[c]
        :: else
        fi;
        bE[c] = cE[c]; bM[c] = cM[c]; own[c] = 1; st[c] = STEADY;
        cE[c] = 0; cM[c] = 0; jn[c] = 0; ack[c] = 0; hd[c] = 0; td[c] = 0; forget_evidence(c);
#ifdef LEASE
        granted[c] = 0;
#endif
        append(c, PLAN, bE[c], bM[c], comm[c])
    :: !ok && x == 0 -> st[c] = STOPPED
    :: !ok && x != 0 -> tried[c] = 1
    fi;
    ok = 0; x = 0; e = 0; living = 0
}

inline commit(c) {
#ifdef MAJORITYCOMMIT
    x = comm[c] + 1;
#else
    smallest_done(c, bM[c]);
#endif
    comm[c] = x;
    assert(gE == bE[c] || gC >= x);
    if
    :: x > gC -> gC = x; gCM = bM[c]
    :: else
    fi;
    append(c, COMMIT, bE[c], bM[c], x);
    x = 0
}

inline consider_leading() {
    x = 0; w = 0;
    do
    :: w < N -> x = x | ((att[w] == 1 && !(dead[1] & BIT(w))) -> BIT(w) : 0); w++
    :: else -> break
    od;
    w = 0; f = x;
    quorum(1, f);
    take_target(1);
    if
    :: ok && f != 0 && (f & x) != 0 -> T[1] = 2; st[1] = RENDEZVOUS; dirty[1] = 1; cM[1] = x
    :: else -> tried[1] = 1
    fi;
    ok = 0; x = 0; e = 0; living = 0; f = 0
}

/* Waiting: revoked without a plan, or a step reported and not committed.  With the lease one side may have to end: those
   who have followed its coordinator, and those who reach nobody else. */
#ifdef LEASE
#define NOBODY_FOR(g) ((!up[0] || st[0] == STOPPED || CUT(0, g)) && (!up[1] || st[1] == STOPPED))
#define ENDS(g) (NOBODY_FOR(g) || term[g] != 0 && st[(term[g] == 0 -> 0 : term[g] - 1)] == STOPPED)
#else
#define ENDS(g) 0
#endif
#define WAITS(g) (g < N && RUNS(g) && !ENDS(g) && (oE[g] != 0 || dn[g] > cm[g]))
/* Nobody is owed anything by a run out of the model's budgets of epochs and log. */
#define EXHAUSTED (!ROOM(0) || !ROOM(1))

#if N == 4
#define ANY(p) (p(0) || p(1) || p(2) || p(3))
#else
#define ANY(p) (p(0) || p(1) || p(2))
#endif

active proctype protocol() {
    d_step {
        st[0] = STEADY; T[0] = 1; bE[0] = 1; bM[0] = ALL; own[0] = 1; maxE[0] = 1; maxE[1] = 1;
        bE[1] = 0; bM[1] = ALL; formedBefore[1] = 1
    }
    do
    :: crashes > 0 && up[0] ->
        d_step {
            crashes--; up[0] = 0;
            st[0] = 0; cE[0] = 0; cM[0] = 0; bE[0] = 0; bM[0] = 0; ex[0] = 0; dead[0] = 0; comm[0] = 0; jn[0] = 0;
            ack[0] = 0; dirty[0] = 0; maxE[0] = 0; tried[0] = 0; dk[0] = 0; dk[1] = 0; dk[2] = 0;
#if N == 4
            dk[3] = 0;
#endif
#ifdef LEASE
            qE[0] = 0; qM[0] = 0; granted[0] = 0;
#endif
            rev[0] = 0; hd[0] = 0; td[0] = 0
        }
    FAULTS(0) FAULTS(1) FAULTS(2)
    BETWEEN(0, 0) BETWEEN(0, 1) BETWEEN(0, 2) BETWEEN(1, 0) BETWEEN(1, 1) BETWEEN(1, 2)
    WORKER(0, 0) WORKER(0, 1) WORKER(0, 2) WORKER(1, 0) WORKER(1, 1) WORKER(1, 2)
    DONE(0) DONE(1) DONE(2)
#if N == 4
    FAULTS(3) BETWEEN(0, 3) BETWEEN(1, 3) WORKER(0, 3) WORKER(1, 3) DONE(3)
#endif
#if W > 0
    BETWEEN(0, N) BETWEEN(1, N)
#endif
#if W > 1
    BETWEEN(0, (N + 1)) BETWEEN(1, (N + 1))
#endif
    COORDINATOR(0) COORDINATOR(1) HEAR(0) HEAR(1)
#ifdef LEASE
    :: qE[0] != 0 -> d_step { take_lease(0) }
    :: qE[1] != 0 -> d_step { take_lease(1) }
#endif
    :: up[1] && st[1] == STANDBY && bE[1] > 0 && !tried[1] -> d_step { consider_leading() }
    :: timeout ->
#ifndef ALIVE                   /* it must be found by what is formed, not by who waits */
        /* the rest: only where candidate 1 does not have the majority, or has stopped, may anybody be left waiting */
        assert(EXHAUSTED || !ANY(WAITS) || !(LEADS(0) || LEADS(1)));
#endif
        break
    od
}
